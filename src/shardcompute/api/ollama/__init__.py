"""Ollama's protocol: chat, generate, embeddings, and what its clients ask about models.

Owns its bodies, its lines of JSON and the adapter that words a chat in them. May call `api.generation` and what is
below it; knows nothing of the other protocols. Models are loaded and removed through the cluster's routes, not here.
"""

from shardcompute.api.ollama.chat import OLLAMA_CHAT_ROUTES
from shardcompute.api.ollama.embeddings import OLLAMA_EMBEDDING_ROUTES
from shardcompute.api.ollama.models import OLLAMA_MODEL_ROUTES

ROUTES = (*OLLAMA_CHAT_ROUTES, *OLLAMA_EMBEDDING_ROUTES, *OLLAMA_MODEL_ROUTES)

__all__ = ["ROUTES"]
