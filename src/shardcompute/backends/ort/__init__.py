"""The CPU backend: a shard as a program of small ONNX Runtime graphs around exact attention."""

from shardcompute.backends.ort.executor import OrtExecutor

__all__ = ["OrtExecutor"]
