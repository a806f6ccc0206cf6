"""HTTPS: the certificate that a server shows, from its operator or made here, and how clients know it again.

Owns keys and certificates of HTTP servers, which are not those of nodes: browsers take neither Ed25519 nor the
cluster's authority. May call the rest of `security`.
"""
