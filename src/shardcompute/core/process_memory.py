"""Memory of the process that computes: what it truly takes, and giving back what is free.

Buffers of long prompts come and go. The C library keeps blocks that were freed for later, of ever larger sizes, unless
it is told where large begins; what is larger than that goes back to the machine at once.
"""

from __future__ import annotations

import ctypes
import io
import logging
import mmap
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

log = logging.getLogger(__name__)
_M_MMAP_THRESHOLD = -3
_MADV_DONTNEED = 4
_PRESENT, _OF_FILE = 1 << 63, 1 << 61
"""What the system says of a page: it is in memory, and a file's or shared."""
_MADV_COLLAPSE = 25
_HUGE_BYTES = 1 << 21
_LEAST_JOINED_BYTES = 1 << 23
_JOINING_S = 5.0
"""Of the processor, for some GiB: a start does not wait for all of a large model."""
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
    """Let go of the code and constants of libraries: what starting and loading used, and nothing uses again, is half of
    it. The rest is found again in the system's own memory of the file, page by page, when it is next used."""
    if sys.platform == "linux":
        try:
            _release_code()
        except OSError as error:
            log.info("the code of libraries stays in memory: %s", error)


def _release_code() -> None:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    found = [_Mapping.read(line) for line in Path("/proc/self/maps").read_text().splitlines()]
    libraries = {mapping.path for mapping in found if mapping.mode == "r-xp"} - {""}
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for mapping in found:
            if mapping.path in libraries and mapping.mode in ("r-xp", "r--p"):
                for start, stop in _unchanged(pages, mapping):
                    advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    stop: int
    mode: str
    path: str
    """Of a file; empty for anything else."""

    @classmethod
    def read(cls, line: str) -> _Mapping:
        addresses, mode, _, _, _, *name = line.split(maxsplit=5)
        start, stop = (int(edge, 16) for edge in addresses.split("-"))
        return cls(start, stop, mode, name[0] if name and name[0].startswith("/") else "")


def _unchanged(pages: io.RawIOBase, mapping: _Mapping) -> list[tuple[int, int]]:
    """Where its pages are those of the file: what a loader wrote to is nowhere else."""
    size, word_bytes = mmap.PAGESIZE, 8
    pages.seek(mapping.start // size * word_bytes)
    content = pages.read((mapping.stop - mapping.start) // size * word_bytes) or b""
    runs: list[tuple[int, int]] = []
    for number, word in enumerate(memoryview(content).cast("Q")):
        if word & _PRESENT and word & _OF_FILE:
            start = mapping.start + number * size
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], start + size)
            else:
                runs.append((start, start + size))
    return runs


def join_pages() -> int:
    """Have weights that were just loaded in huge pages, where the system makes those: they are read over and over, and
    looking up where small ones lie costs up to a tenth of that. Only where all of a huge page is there already, so that
    nothing more is taken. The bytes that were joined."""
    if sys.platform == "linux":
        try:
            return _join_pages()
        except OSError as error:
            log.info("weights stay in small pages: %s", error)
    return 0


def _join_pages() -> int:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    joined, until_s = 0, time.thread_time() + _JOINING_S
    if advise is None:
        return 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for line in Path("/proc/self/maps").read_text().splitlines():
            mapping = _Mapping.read(line)
            if mapping.mode != "rw-p" or len(line.split()) > 5:
                continue
            for start in _whole(pages, mapping):
                if time.thread_time() > until_s:
                    return joined
                if advise(ctypes.c_void_p(start), ctypes.c_size_t(_HUGE_BYTES), _MADV_COLLAPSE) != 0:
                    break
                joined += _HUGE_BYTES
    return joined


def _whole(pages: io.RawIOBase, mapping: _Mapping) -> Iterator[int]:
    """Where huge pages might begin in a mapping of which every small page is in memory."""
    start, stop = -(-mapping.start // _HUGE_BYTES) * _HUGE_BYTES, mapping.stop // _HUGE_BYTES * _HUGE_BYTES
    each = _HUGE_BYTES // mmap.PAGESIZE
    if stop - start < _LEAST_JOINED_BYTES:
        return
    for first in range(start, stop, _HUGE_BYTES):
        pages.seek(first // mmap.PAGESIZE * 8)
        words = memoryview(pages.read(8 * each) or b"").cast("Q")
        if len(words) == each and all(word & _PRESENT for word in words):
            yield first


def resident_bytes() -> int:
    """What the process takes of the machine's memory, everything counted; rounded, so that it is no news all the
    time."""
    resident: int = psutil.Process().memory_info().rss
    return round(resident / _STEP_BYTES) * _STEP_BYTES
