"""Canaries of a cluster: asked as clients ask, when nobody can foresee it, and compared with what is on record."""
