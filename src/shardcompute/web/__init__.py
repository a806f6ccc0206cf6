"""The web page: a cluster in a browser, from the same routes as every other client. Static files, mounted at `/`."""

from shardcompute.web.page import page_routes

__all__ = ["page_routes"]
