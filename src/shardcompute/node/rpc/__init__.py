"""RPC: how nodes talk. The endpoint that listens and dials, commands and their replies, frames, probes.

Owns the links of a node and who may open which, the commands of the control plane, and the translation between what
rooms compute with (`core.steps`) and what travels (`wire`). May call `wire`, `security` and `control`'s events; has
no role: drivers, workers and the coordinator all stand on it.
"""
