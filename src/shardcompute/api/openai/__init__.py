"""OpenAI's protocol: chat and plain completions, responses, embeddings, models, and vLLM's token routes beside them.

Owns their bodies, replies and SSE framing, and the adapters that word generations in them. May call `api.generation`
and what is below it; knows nothing of the other protocols.
"""

from shardcompute.api.openai.chat import CHAT_ROUTES
from shardcompute.api.openai.completions import COMPLETIONS_ROUTES
from shardcompute.api.openai.embeddings import EMBEDDINGS_ROUTES
from shardcompute.api.openai.models import MODELS_ROUTES
from shardcompute.api.openai.responses import RESPONSES_ROUTES
from shardcompute.api.openai.tokens import TOKENS_ROUTES

ROUTES = (
    *MODELS_ROUTES,
    *CHAT_ROUTES,
    *COMPLETIONS_ROUTES,
    *RESPONSES_ROUTES,
    *EMBEDDINGS_ROUTES,
    *TOKENS_ROUTES,
)

__all__ = ["ROUTES"]
