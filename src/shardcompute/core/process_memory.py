"""Memory of the process that computes: what it truly takes, and giving back what is free.

Buffers of long prompts come and go. The C library keeps blocks that were freed for later, of ever larger sizes, unless
it is told where large begins; what is larger than that goes back to the machine at once.
"""

from __future__ import annotations

import ctypes
import logging
import sys

import psutil

log = logging.getLogger(__name__)
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 18
_STEP_BYTES = 1 << 23


def give_back_large_blocks() -> bool:
    """From now on; for the whole process. False where the C library cannot be told."""
    if sys.platform == "linux":
        try:
            return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
        except (OSError, AttributeError) as error:
            log.info("freed memory may be kept by the C library: %s", error)
    return False


def return_freed_memory() -> None:
    """Give the memory that loading used and freed back to the system, where the C library would keep it."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resident_bytes() -> int:
    """What the process takes of the machine's memory, everything counted; rounded, so that it is no news all the
    time."""
    resident: int = psutil.Process().memory_info().rss
    return round(resident / _STEP_BYTES) * _STEP_BYTES
