"""Generations behind every protocol: from a request body to a plan, from running generations to replies.

Owns the chat request and its choices, request parameters, structured outputs, embeddings, and how an answer is
streamed or sent whole. Calls `node.service`, `api.tools` and `api.metrics`; protocols call it, and it knows none of
them: they bring a `ReplyAdapter` and a `Framing`.
"""
