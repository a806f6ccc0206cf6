"""Sockets that are accepted or put under TLS, and closed whatever happens meanwhile."""
