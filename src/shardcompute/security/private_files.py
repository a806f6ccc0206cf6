"""Files and folders of one user: written whole or not at all, readable by their owner alone.

A file is written next to its place with mode 0600 and then moved there, so that a crash or a second process
never leaves half a key, and is on the disk when that returns. A file that others could use is closed to them when it
is read, or refused (`read_owned`); one that another user put there is refused, and so is a folder. Failures are
`SourceError`; a missing file stays `FileNotFoundError`, and creating over an existing one `FileExistsError`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from shardcompute.core.errors import DiskFullError, SourceError, UsageError

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 1 << 20
_ROOT = 0


def open_private_folder(folder: Path) -> None:
    """A folder for this user alone, made if there is none.

    One that others could read is closed to them. UsageError where somebody else could have put things into it: it
    belongs to another user, everybody can write to it, or it is a link (folders above it may be links of one's own).
    """
    folder = folder.absolute()
    try:
        if os.name == "nt":
            folder.mkdir(parents=True, exist_ok=True)
            return
        _check_way(folder)
        for missing in reversed([each for each in (folder, *folder.parents) if not os.path.lexists(each)]):
            missing.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise _unwritable(folder, error) from error
    _check_folder(folder, found)
    close_to_others(folder)


def close_to_others(folder: Path) -> None:
    """Whatever lies in this folder, if there is one, is for its owner alone."""
    with contextlib.suppress(OSError):
        if os.name != "nt" and folder.stat().st_mode & 0o077:
            _tighten(folder, 0o700, "other users could look into it")


def make_private(path: Path) -> None:
    """An empty file for its owner alone; one that is there is kept, and closed to others. Whatever SQLite puts beside
    a database takes over its mode."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SourceError(f"{path} is a link", hint="remove it, or choose another folder") from error
        raise _unwritable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise SourceError(f"{path} is no file", hint="remove it, or choose another folder")
        _keep_private(path, handle)
    finally:
        os.close(handle)


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
        _sync_folder(path.parent)


def replace_private(path: Path, content: bytes) -> None:
    """Writes a file, taking the place of the old one in one move."""
    with _writing(path, content) as written:
        written.replace(path)
        _sync_folder(path.parent)


def read_private(path: Path) -> bytes:
    """The content of a file of at most 1 MiB, which is closed to others if its mode lets them in."""
    try:
        with path.open("rb") as file:
            _keep_private(path, file.fileno())
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
    return content


def private_opener(path: str, flags: int) -> int:
    """For `open`: new files are for their owner alone."""
    return os.open(path, flags, 0o600)


def read_owned(path: Path, *, is_secret: bool = True) -> bytes:
    """Like `read_private`, of a file that is the user's own: no link, nobody else's, closed to all others.

    One that is no secret may be read by others, and written by none of them.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    # A pipe that nobody writes to would otherwise be waited for.
    flags |= getattr(os, "O_NONBLOCK", 0)
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    except FileNotFoundError:
        raise
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise SourceError(
            f"{path} cannot be trusted or read: {why}", hint="run this as the user who runs ShardCompute"
        ) from error
    complaint = _complaint(found, 0o077 if is_secret else 0o022)
    if complaint or len(content) > _MAX_BYTES:
        raise SourceError(
            f"{path} cannot be trusted: {complaint or 'it is far too large'}",
            hint="delete it, and start again what it belongs to",
        )
    return content


def _complaint(found: os.stat_result, closed: int) -> str:
    """Why somebody else may have written or read this file; empty if nobody can have."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no file"
    if os.name == "nt":
        return ""
    user = _user_id()
    if user not in (0, found.st_uid):
        return f"it belongs to user {found.st_uid}"
    if stat.S_IMODE(found.st_mode) & closed:
        return "other users can read or change it" if closed & 0o044 else "other users can change it"
    return ""


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


def _sync_folder(folder: Path) -> None:
    """Without this, a file that was just moved to its place may be gone after a power cut."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network shares cannot do that for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def _keep_private(path: Path, handle: int) -> None:
    """SourceError for another user's file; one that others can use is closed to them."""
    if os.name == "nt":
        return
    found = os.fstat(handle)
    if _user_id() != _ROOT and found.st_uid not in (_user_id(), _ROOT):
        raise SourceError(
            f"{path} belongs to another user (id {found.st_uid})",
            hint="see who put it there; take it over with chown, or choose another folder",
        )
    if stat.S_IMODE(found.st_mode) & 0o077 and stat.S_ISREG(found.st_mode):
        _tighten(path, 0o600, "other users could use it")


def _tighten(path: Path, mode: int, why: str) -> None:
    try:
        path.chmod(mode)
        is_tight = stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    except OSError:
        is_tight = False
    if is_tight:
        _LOG.warning("%s: %s; it is now for its owner alone (mode %o)", path, why, mode)
    else:
        _LOG.warning("%s: %s, and its disk cannot prevent that; keep secrets elsewhere", path, why)


def _check_way(folder: Path) -> None:
    """UsageError where another user's link leads to `folder`; a warning where others could put one there."""
    for each in folder.parents:
        with contextlib.suppress(FileNotFoundError):
            found = each.lstat()
            if stat.S_ISLNK(found.st_mode) and found.st_uid not in (_user_id(), _ROOT):
                raise UsageError(
                    f"{each}, on the way to {folder}, is a link of another user (id {found.st_uid})",
                    hint="choose a folder below your own, such as one in your home",
                )
            found = each.stat()
            is_open = found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX
            if is_open or found.st_uid not in (_user_id(), _ROOT):
                _LOG.warning("other users can exchange what lies in %s, also %s", each, folder)


def _check_folder(folder: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(
            f"{folder} is a link, and a folder with keys must not be one",
            hint=f"give the folder itself: {os.path.realpath(folder)}",
        )
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{folder} is not a folder", hint="choose another one")
    if found.st_uid != _user_id():
        raise UsageError(
            f"{folder} belongs to another user (id {found.st_uid}), who could change what is in it",
            hint="choose another folder, or take this one over with chown",
        )
    if found.st_mode & 0o002:
        raise UsageError(
            f"everybody can write to {folder}: what is in it may not be yours",
            hint=f"look at what is there, then run: chmod 700 {folder}",
        )


def _user_id() -> int:
    """Windows has no such numbers: there files are private by the folder that they lie in."""
    if sys.platform == "win32":
        return _ROOT
    else:
        return os.geteuid()


def _unwritable(path: Path, error: OSError) -> SourceError:
    kind = DiskFullError if error.errno == errno.ENOSPC else SourceError
    return kind(
        f"{path} cannot be written: {error.strerror or error}",
        hint="check the free space and who may write to this folder",
    )
