"""Soak benchmark: a local cluster under mixed load for minutes, to find leaks, slowdowns and failures.

Owns the mix of requests, the samples of every process, and the criterion by which a trend counts as growth. May call
`bench.servers` and reads processes through psutil.
"""
