"""The HTTP API over any `node.service.Service`: OpenAI's, Anthropic's and Ollama's protocols, and the cluster's own.

Owns the ASGI application, its middleware, authentication and errors, and the server that runs it. Each protocol is a
room that translates to `generation` and back; none knows another. Calls `node` through its service and admin.
"""

from shardcompute.api.app import create_app
from shardcompute.api.body import Limits
from shardcompute.api.server import serve

__all__ = ["Limits", "create_app", "serve"]
