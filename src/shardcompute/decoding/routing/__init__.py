"""Whether and how each session speculates: what drafts promise, what frames cost, what came of it under load.

Owns the router of one chain with its estimates. May call `decoding`'s pure functions and `core`; the driver asks it,
round by round, and tells it what happened.
"""
