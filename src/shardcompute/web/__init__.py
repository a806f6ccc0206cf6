"""The web page: a cluster in a browser, from the same routes as every other client.

Owns static files, mounted at `/`, and nothing that runs on the server besides serving them. May call nothing of ours:
it speaks to `api` over HTTP alone.
"""

from shardcompute.web.page import page_routes

__all__ = ["page_routes"]
