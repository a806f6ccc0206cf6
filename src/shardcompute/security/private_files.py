"""Files that hold secrets: written whole or not at all, readable by their owner alone.

A file is written next to its place with mode 0600 and then moved there, so that a crash or a second process
never leaves half a key. Reading warns when others could read the file too. Failures are `SourceError`;
a missing file stays `FileNotFoundError`, and creating over an existing one `FileExistsError`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from shardcompute.core.errors import DiskFullError, SourceError

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 1 << 20


def create_private(path: Path, content: bytes) -> None:
    """Writes a new file; raises `FileExistsError` if there is one, even one made at the same moment."""
    with _writing(path, content) as written:
        try:
            # A link, unlike a rename, refuses to take the place of a file that another process just made.
            os.link(written, path)
        except FileExistsError:
            raise
        except OSError:
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            # File systems without links (exFAT, some network shares).
            written.replace(path)


def replace_private(path: Path, content: bytes) -> None:
    """Writes a file, taking the place of the old one in one move."""
    with _writing(path, content) as written:
        written.replace(path)


def read_private(path: Path) -> bytes:
    """The content of a file of at most 1 MiB; warns if its mode lets others read or change it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror or error}",
            hint="check that it is a file and belongs to the user who runs ShardCompute",
        ) from error
    if len(content) > _MAX_BYTES:
        raise SourceError(f"{path} is far too large for a key", hint="restore it from a copy")
    if os.name != "nt" and stat.S_IMODE(mode) & 0o077:
        _LOG.warning("%s holds a secret and other users can use it; run: chmod 600 %s", path, path)
    return content


@contextlib.contextmanager
def _writing(path: Path, content: bytes) -> Iterator[Path]:
    """A finished private file beside `path`, which is gone afterwards unless it was moved."""
    written = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_new(written, content)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            yield written
        except FileExistsError:
            raise
        except OSError as error:
            raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _unwritable(path: Path, error: OSError) -> SourceError:
    kind = DiskFullError if error.errno == errno.ENOSPC else SourceError
    return kind(
        f"{path} cannot be written: {error.strerror or error}",
        hint="check the free space and who may write to this folder",
    )
