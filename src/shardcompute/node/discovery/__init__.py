"""Discovery: how machines find a cluster, and find it again after addresses have changed.

`nearby` by multicast DNS in the local network. What is found is only an address to try: whoever answers there must
prove itself by certificates or a pairing code. May call `security`.
"""
