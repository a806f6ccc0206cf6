"""Anthropic's protocol: messages, and the count of their tokens.

Owns its bodies, its named events and the adapter that words a chat as content blocks. May call `api.generation` and
what is below it; knows nothing of the other protocols.
"""

from shardcompute.api.anthropic.messages import MESSAGES_ROUTES as ROUTES

__all__ = ["ROUTES"]
