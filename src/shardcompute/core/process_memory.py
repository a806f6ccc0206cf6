"""Memory of the process that computes: what it truly takes, and giving back what is free.

Buffers of long prompts come and go. The C library keeps blocks that were freed for later, of ever larger sizes, unless
it is told where large begins; what is larger than that goes back to the machine at once.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
from pathlib import Path

import psutil

log = logging.getLogger(__name__)
_M_MMAP_THRESHOLD = -3
_MADV_DONTNEED = 4
_CODE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r-xp .* /.*\n(?:\w+:.*\n)*?Anonymous: +0 kB$", re.MULTILINE)
"""A mapping of a file's code of which no page was written to."""
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


def release_code() -> None:
    """Let go of the code of libraries: what starting and loading ran, and nothing runs again, is a third of it. The
    rest is found again in the system's own memory of the file, page by page, when it is next run."""
    if sys.platform == "linux":
        _release_code()


def _release_code() -> None:
    libc = ctypes.CDLL(None)
    advise = getattr(libc, "madvise", None)
    if advise is None:
        return
    try:
        mappings = Path("/proc/self/smaps").read_bytes()
    except OSError as error:
        log.info("the code of libraries stays in memory: %s", error)
        return
    for found in _CODE.finditer(mappings):
        start, stop = (int(edge, 16) for edge in found.groups())
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


def resident_bytes() -> int:
    """What the process takes of the machine's memory, everything counted; rounded, so that it is no news all the
    time."""
    resident: int = psutil.Process().memory_info().rss
    return round(resident / _STEP_BYTES) * _STEP_BYTES
