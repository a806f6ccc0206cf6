"""Weights on their way between machines: tensors in pieces, from several peers at once, verified.

Owns fetching what a shard needs (client), serving what is held here (server), where pieces are put together until
they are proven right, and what travels beside tensors: draft heads and tokenizers. May call `weights`, `wire` and
`runtime`.
"""
