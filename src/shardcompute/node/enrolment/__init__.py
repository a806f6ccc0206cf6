"""Enrolment: how a machine becomes a node of a cluster, and what it keeps of that.

Owns the exchange of a join token for a certificate (client and server), and the folder in which a node's key,
certificate and coordinator's addresses lie. May call `security`; everything after that happens over `rpc`.
"""
