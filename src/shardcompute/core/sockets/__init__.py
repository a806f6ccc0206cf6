"""Sockets: how any part of the system listens, connects over IPv6 and IPv4, accepts and closes."""
