"""Memory promise of a worker: `--max-memory` bounds its whole process; what that takes by itself is measured first."""

from __future__ import annotations

import contextlib
import importlib

import psutil

from shardcompute.core.errors import UsageError
from shardcompute.core.units import format_bytes

_MIB = 1 << 20
_SERVING_BYTES = 48 * _MIB
"""Links, threads, a hosted driver with its tokenizer, what sessions leave behind: an estimate, which the tests of the
promise hold workers to."""
_LEAST_ROOM_BYTES = 64 * _MIB
"""For the speed probe at the start, and less than any stage needs for its scratch."""
_LIBRARIES = {
    "onnx": "shardcompute.backends.ort",
    "torch": "shardcompute.backends.torch",
    "mlx": "mlx.core",
    "llamacpp": "xllamacpp",
}


def measure_process_bytes(backend: str) -> int:
    """What this process takes with a backend's libraries and without any layer: what it has now, and what serving adds
    to that whatever it serves."""
    with contextlib.suppress(ImportError, KeyError):
        importlib.import_module(_LIBRARIES[backend])
    resident: int = psutil.Process().memory_info().rss
    return resident + _SERVING_BYTES


def least_promise(process_bytes: int) -> int:
    """The least `--max-memory` of a worker whose process takes so much by itself."""
    return process_bytes + _LEAST_ROOM_BYTES


def check_promise(memory_bytes: int, process_bytes: int) -> None:
    """UsageError where a process cannot keep within `memory_bytes` even before it holds anything."""
    least_bytes = least_promise(process_bytes)
    if memory_bytes < least_bytes:
        raise UsageError(
            f"a worker cannot keep within {format_bytes(memory_bytes)}: its process alone takes "
            f"{format_bytes(process_bytes)}, and {format_bytes(_LEAST_ROOM_BYTES)} are the least for any layer",
            hint=f"give it --max-memory {-(-least_bytes // _MIB)}M or more",
        )
