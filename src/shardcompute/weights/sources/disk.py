"""Atomic writes of large files, so that a crash, a full disk or a second process leaves nothing half done.

`PartialFile` grows next to its destination and takes its name only when size and hash are right;
`check_room` says no before a byte is written; `hold_lock` lets one process at a time through.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from shardcompute.core.errors import CorruptModelError, DiskFullError, SourceError

CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def format_bytes(count: int) -> str:
    """A size for people: 93.8 MiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count} bytes"


def check_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise `DiskFullError` unless `needed_bytes` fit into `folder`'s disk with a little to spare."""
    free = _free_bytes(folder)
    missing = needed_bytes + _SPARE_BYTES - free
    if missing > 0:
        raise DiskFullError(
            f"{what} needs {format_bytes(needed_bytes)} in {folder}, where {format_bytes(free)} are free",
            hint=f"free {format_bytes(missing)} more, or set SHARDCOMPUTE_HOME to a folder on a larger disk",
        )


@contextlib.contextmanager
def disk_errors(path: Path, remaining_bytes: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn the system's complaints about `path` into ours. `remaining_bytes` were still to be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise SourceError(
                f"{path} cannot be written or read: {error.strerror or error}",
                hint="check the folder's permissions and its disk",
            ) from error
        limit = "quota" if error.errno == errno.EDQUOT else "disk"
        raise DiskFullError(
            f"the {limit} is full: {path.name} needs {format_bytes(remaining_bytes())} more in {path.parent}",
            hint="free some space, or set SHARDCOMPUTE_HOME to a folder on a larger disk",
        ) from error


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class PartialFile:
    """A file on its way to `destination`, which appears only when `finish` found it whole.

    What was written stays for the next attempt when the block is left early, except on a full disk: then it
    is deleted, so that the disk is not left full. `identity` says which content it is (a hash or an ETag); a
    partial file of another identity is not continued.
    """

    def __init__(self, destination: Path, size: int, sha256: str | None = None) -> None:
        self.destination = destination
        self.path = destination.with_name(destination.name + ".partial")
        self._identity_path = destination.with_name(destination.name + ".partial-of")
        self._expected_size = size
        self._sha256 = sha256
        self._file: FileIO | None = None
        self._digest = hashlib.sha256()
        self.size = 0
        self.identity = ""

    def __enter__(self) -> Self:
        with self._disk_errors():
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_append(self.path)
            self.size = os.fstat(self._file.fileno()).st_size
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                self.identity = self._identity_path.read_text(encoding="utf-8")
            if self.size > self._expected_size:
                self.restart("")
            elif self.size:
                with self.path.open("rb") as written:
                    while chunk := written.read(CHUNK_BYTES):
                        self._digest.update(chunk)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if isinstance(error, DiskFullError | CorruptModelError):
            self._discard()

    def restart(self, identity: str) -> None:
        """Begin again from nothing, with the content called `identity`."""
        with self._disk_errors():
            assert self._file is not None
            self._file.truncate(0)
            self._identity_path.write_text(identity, encoding="utf-8")
        self.size = 0
        self.identity = identity
        self._digest = hashlib.sha256()

    def write(self, chunk: bytes | memoryview) -> None:
        """Append; more than the expected size is refused before it reaches the disk."""
        if self.size + len(chunk) > self._expected_size:
            raise CorruptModelError(
                f"{self.destination.name} is longer than the {self._expected_size} bytes announced",
                hint="try again later; the source is inconsistent",
            )
        view = memoryview(chunk)
        with self._disk_errors():
            assert self._file is not None
            while len(view):
                count = self._file.write(view)
                self._digest.update(view[:count])
                self.size += count
                view = view[count:]

    def finish(self) -> str:
        """Check size and hash, put the file in place and give its SHA-256."""
        digest = self._digest.hexdigest()
        if self.size != self._expected_size:
            problem = f"has {self.size} bytes instead of {self._expected_size}"
        elif self._sha256 is not None and digest != self._sha256:
            problem = f"has SHA-256 {digest} instead of {self._sha256}"
        else:
            with self._disk_errors():
                assert self._file is not None
                os.fsync(self._file.fileno())
                self._file.close()  # before the rename: Windows does not rename open files
                os.replace(self.path, self.destination)
                self._identity_path.unlink(missing_ok=True)
            return digest
        raise CorruptModelError(
            f"{self.destination.name} arrived damaged: it {problem}",
            hint="fetch it again; the bad copy was deleted",
        )

    def _disk_errors(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(self.destination, lambda: self._expected_size - self.size)

    def _discard(self) -> None:
        for path in (self.path, self._identity_path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def hold_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at `path`; `on_wait` is called once if another process holds it.

    The file stays behind: deleting it would let a third process lock a file that no longer has a name.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    with file:
        with disk_errors(path):
            if not _try_lock(file.fileno()):
                on_wait()
                _wait_for_lock(file.fileno())
        try:
            yield
        finally:
            _unlock(file.fileno())


def _free_bytes(folder: Path) -> int:
    with disk_errors(folder):
        return shutil.disk_usage(folder).free


def _open_append(path: Path) -> FileIO:
    return FileIO(path, "ab")


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EDEADLK):
                return False
            raise
        return True

    def _wait_for_lock(descriptor: int) -> None:
        while True:
            try:
                os.lseek(descriptor, 0, os.SEEK_SET)
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)  # gives up after ten seconds
                return
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EDEADLK):
                    raise

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait_for_lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
