"""Runtime: one shard at work. A stage with its sessions and KV, and the tail that picks tokens.

Owns opening a stage on a backend, `step(work, openings, activations)`, which truncates and writes KV, sampling at the
last stage and the drafts that its head makes. May call `decoding`, `weights`, `models` and `backends`; knows neither
frames nor who sends them.
"""
