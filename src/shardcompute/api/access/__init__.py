"""Access to the API: what routes ask for, what keys may spend, which names are the server's own, how the page signs in.

Owns the rules; `api.auth` applies them to every request, once. May call `security`, `node.service`, and the
API's errors and bodies.
"""
