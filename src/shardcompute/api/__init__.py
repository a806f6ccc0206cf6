"""The HTTP API: OpenAI's routes, tokens, health and metrics, over any `node.service.Service`."""

from shardcompute.api.app import create_app
from shardcompute.api.body import Limits
from shardcompute.api.server import serve

__all__ = ["Limits", "create_app", "serve"]
