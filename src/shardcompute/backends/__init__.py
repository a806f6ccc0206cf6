"""Backends: array primitives (`ops`), and executors that run a slice of a model with them.

Owns matrix forms, the KV of sessions, and one executor each for ONNX Runtime, torch, MLX, numpy (the
oracle) and `transformers`. May call `core` alone: the network that an executor runs is handed in.
"""
