"""Shares at a client: two machines of a cluster that compute linear maps for it, checked."""
