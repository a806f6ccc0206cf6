"""Byte sources of a file: anything with a name and a size that can be read at an offset.

`read` gives exactly what was asked for or raises: `CorruptModelError` when the file ends earlier and
`SourceError` when it cannot be read at all. Nothing is allocated before the range is known to lie inside the
file. Reading is safe from several threads. Whoever opens a source closes it, or the tensor file it went into.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from shardcompute.core.errors import CorruptModelError, SourceError, UnknownModelError

# One read call moves at most 2 GiB on Linux and macOS; asking for less keeps short reads the exception.
_MAX_READ_BYTES = 1 << 30
# A file that the system has in memory is copied by one core at a fifth of what the memory gives.
_PIECE_BYTES = 16 << 20
_MOST_READERS = 16


class ByteSource(Protocol):
    """One file, wherever it lies."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    def read(self, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes from `offset`."""
        ...

    def close(self) -> None:
        """Free what reading holds. Closing twice is fine; reading afterwards is not."""
        ...


def check_range(name: str, size: int, offset: int, length: int) -> None:
    """Raise unless `[offset, offset + length)` lies inside a file of `size` bytes."""
    if offset < 0 or length < 0 or offset + length > size:
        raise CorruptModelError(
            f"{name} is cut short: bytes {offset} to {offset + length} are needed, it has {size}",
            hint="fetch the file again; the download was probably interrupted",
        )


class LocalBytes:
    """A file on this machine's disk. `bytes_read` counts what was read so far."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.name = str(path)
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._readers: ThreadPoolExecutor | None = None
        try:
            self._file = FileIO(self.path, "rb")
        except FileNotFoundError:
            raise UnknownModelError(
                f"there is no file {self.name}", hint="check the path, or fetch the model again"
            ) from None
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{self.name} cannot be opened: {error}", hint="check that it is a file and may be read"
            ) from error
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, length: int) -> memoryview:
        check_range(self.name, self.size, offset, length)
        # Not a bytearray, whose every byte would be written twice.
        view = np.empty(length, np.uint8).data
        if length >= 2 * _PIECE_BYTES and _reader_count() > 1:
            starts = range(0, length, _PIECE_BYTES)
            pieces = [(view[start : start + _PIECE_BYTES], offset + start) for start in starts]
            list(self._open_readers().map(self._read_piece, *zip(*pieces, strict=True)))
        else:
            self._read_piece(view, offset)
        with self._lock:
            self.bytes_read += length
        return view

    def _read_piece(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = self._read_into(view[done : done + _MAX_READ_BYTES], offset + done)
            except OSError as error:
                raise SourceError(
                    f"{self.name} cannot be read at byte {offset + done}: {error}", hint="check the disk"
                ) from error
            if count == 0:  # the file shrank after it was opened
                check_range(self.name, offset + done, offset, len(view))
            done += count

    def _open_readers(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(_reader_count(), "read file")
            return self._readers

    def _read_into(self, view: memoryview, offset: int) -> int:
        if sys.platform == "win32":
            with self._lock:  # no positional reads: the file position is shared
                self._file.seek(offset)
                return self._file.readinto(view) or 0
        else:
            return os.preadv(self._file.fileno(), [view], offset)

    def close(self) -> None:
        if self._readers is not None:
            self._readers.shutdown()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalPart:
    """A range of a file on this machine's disk, read for long after it was opened: it must not change meanwhile.

    It is closed with its last user, if nobody closes it before.
    """

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self.name = str(path)
        self.size = size
        self._offset = offset
        self._lock = threading.Lock()
        try:
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise SourceError(f"{self.name} cannot be opened: {error}", hint="check the disk") from error
        self._close = weakref.finalize(self, os.close, self._file)
        self._mark = self._look()

    def read(self, offset: int, length: int) -> memoryview:
        check_range(self.name, self.size, offset, length)
        try:
            with self._lock:
                mark, content = self._look(), self._read(self._offset + offset, length)
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read: {error}", hint="check the disk") from error
        if mark != self._mark or len(content) != length:
            raise CorruptModelError(
                f"{self.name} was changed while it was in use", hint="leave a model that is served as it is"
            )
        return memoryview(content)

    def close(self) -> None:
        self._close()

    def _look(self) -> tuple[int, int]:
        """What tells that the file is as it was."""
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def _read(self, offset: int, length: int) -> bytes:
        if sys.platform == "win32":
            os.lseek(self._file, offset, os.SEEK_SET)
            return os.read(self._file, length)
        else:
            return os.pread(self._file, length, offset)


def _reader_count() -> int:
    """Threads that read one range; where the file has a single position they would only wait for each other."""
    return 1 if sys.platform == "win32" else min(_MOST_READERS, os.cpu_count() or 1)
