"""ONNX Runtime backend: a shard on the CPU as a program of small graphs around exact attention.

Owns the graphs, the buffers between them and attention's kernels. May call its siblings in `backends` and `core`.
"""

from shardcompute.backends.ort.executor import OrtExecutor

__all__ = ["OrtExecutor"]
