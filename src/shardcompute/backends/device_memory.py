"""Device memory that runs out: how each library says so, as one error of ours, and giving back what they hoard.

Nothing is imported for it: a library that was never loaded holds nothing and says nothing.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from shardcompute.core.errors import DeviceMemoryError, ShardComputeError

T = TypeVar("T")
_TYPES = frozenset({"OutOfMemoryError", "MemoryError"})
"""torch's (of CUDA, ROCm and XPU), and Python's, of which numpy's is one."""
_SAID = (
    "out of memory",  # CUDA, HIP and MPS; drivers and libraries around them
    "outofdevicememory",  # Vulkan
    "outofhostmemory",
    "bad_alloc",  # C++: ONNX Runtime, llama.cpp
    "failed to allocate memory",  # ONNX Runtime's arena
    "can't allocate memory",  # torch on CPUs
    "cannot allocate memory",
    "unable to allocate",  # MLX
    "[metal::malloc]",
    "alloc_failed",  # cuBLAS, cuDNN
    "failed to allocate buffer",  # ggml
)
_MOST_CHARACTERS = 200


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a library says that there is no memory left, on its device or on the host."""
    if isinstance(error, ShardComputeError):
        cause = error.__cause__
        return isinstance(error, DeviceMemoryError) or (cause is not None and is_out_of_memory(cause))
    if any(kind.__name__ in _TYPES for kind in type(error).__mro__):
        return True
    said = str(error).lower()
    return any(part in said for part in _SAID)


def device_memory_error(error: BaseException, doing: str) -> DeviceMemoryError:
    """What a library said about memory, with what to do. What the failed call held is let go."""
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, DeviceMemoryError):
        return error
    lines = str(error).strip().splitlines()
    said = lines[0][:_MOST_CHARACTERS] if lines else type(error).__name__
    return DeviceMemoryError(
        f"memory ran out while {doing}: {said}",
        hint="end what else uses the device's memory, or offer less with --max-memory",
    )


def free_caches() -> None:
    """Give back what libraries keep of memory that was freed, so that the next allocation finds it."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if torch.backends.mps.is_available():
            torch.mps.empty_cache()
    mlx = sys.modules.get("mlx.core")
    if mlx is not None and hasattr(mlx, "clear_cache"):
        mlx.clear_cache()


def free_device_bytes(device: str) -> int | None:
    """What is free on a GPU of torch, with what torch keeps of it for the next allocation; None where torch was never
    loaded, or does not compute there."""
    torch = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda") or not torch.cuda.is_initialized():
        return None
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + max(0, int(kept))


def within_memory(compute: Callable[[], T], free: Callable[[], None], doing: str) -> T:
    """`compute()`, once more after `free()` where memory ran out. DeviceMemoryError where it does so again."""
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Outside of this block, so that nothing refers to what the failed call had allocated.
        device_memory_error(error, doing)
    free()
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = device_memory_error(error, doing)
    free()
    raise failed
