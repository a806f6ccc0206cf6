"""Copying from a session's own text: where its last tokens occurred before, and how much what came then counts.

Owns the index of a session's n-grams and the mixture of copied tokens with a draft head's. May call `decoding`'s pure
functions; whoever drafts asks it.
"""
