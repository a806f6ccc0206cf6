"""Device, stream and number format that MLX computes with."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from shardcompute.core.errors import BackendError, UsageError

FORMATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
GPU_NAMES = ("mlx", "gpu", "mps")

_CACHE_BYTES = 256 << 20
"""Freed buffers that MLX keeps for its next allocation; without a bound it keeps all that it ever held."""


def open_stream(name: str) -> Any:
    """A stream on the named device (`cpu`, `mlx` or `auto`) that any thread may use, one at a time."""
    if name in GPU_NAMES and not mx.is_available(mx.gpu):
        raise BackendError("mlx sees no GPU here", hint="use an Apple silicon Mac, or --device cpu")
    if name not in (*GPU_NAMES, "cpu", "auto"):
        raise UsageError(f"mlx cannot compute on {name!r}", hint="use --device mlx or cpu")
    is_gpu = name in GPU_NAMES or (name == "auto" and mx.is_available(mx.gpu))
    mx.set_cache_limit(_CACHE_BYTES)
    # Streams of the ordinary kind belong to the thread that made them; a shard is loaded in one and steps in another.
    return mx.new_thread_unsafe_stream(mx.gpu if is_gpu else mx.cpu)


def is_gpu_stream(stream: Any) -> bool:
    return bool(stream.device == mx.Device(mx.gpu))


def choose_format(name: str, *, is_gpu: bool) -> Any:
    """`auto` is float32 on CPUs and bfloat16 on GPUs."""
    if name == "auto":
        return mx.bfloat16 if is_gpu else mx.float32
    if name not in FORMATS:
        raise UsageError(
            f"unknown number format {name!r}", hint=f"choose auto or one of {', '.join(FORMATS)}"
        )
    return FORMATS[name]
