"""Originals: weights that a worker reads from the very file which the coordinator on its machine serves.

A coordinator notes, in a folder of its user's alone, where each model that it serves lies. A worker of the same user
that has been told to load a model, and finds such a note of it, opens the file itself: nothing travels, and nothing is
written to its cache. Taken are only files that are the same as when they were noted, by device, number, size and time
of change, looked at before and after they are read, and tensors of the types and shapes that the coordinator's card
says. Hashes are not compared then: the coordinator would make them of the same bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardcompute.core.closing import Closing
from shardcompute.core.errors import CorruptModelError, ShardComputeError
from shardcompute.core.settings import load_settings
from shardcompute.weights.card import Card
from shardcompute.weights.checkpoint import open_tensors
from shardcompute.weights.formats.bytes import ByteSource, LocalBytes
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.formats.tensor_file import TensorEntry, TensorFile, lasting_bytes
from shardcompute.weights.served import Origin
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

log = logging.getLogger(__name__)
_MOST_NOTE_BYTES = 1 << 20


class FileMark(msgspec.Struct, frozen=True):
    """What tells that a file is still the one it was."""

    path: str
    device: int
    number: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileMark:
        found = path.stat()
        return cls(str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    @property
    def holds(self) -> bool:
        try:
            return FileMark.of(Path(self.path)) == self
        except OSError:
            return False


class OriginalNote(msgspec.Struct, frozen=True):
    """Where a served model lies: `path` is what to open, `files` are all that its tensors are read from."""

    path: str
    is_packed: bool
    files: list[FileMark]


def originals_folder() -> Path | None:
    """The folder of this user's notes, made if need be; None where others could write there."""
    if not hasattr(os, "getuid"):
        folder = Path(tempfile.gettempdir(), "shardcompute-originals")
        folder.mkdir(exist_ok=True)
        return folder
    folder = Path(tempfile.gettempdir(), f"shardcompute-originals-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = found.st_uid == os.getuid() and found.st_mode & 0o777 == 0o700 and folder.is_dir()
    return folder if is_own and not folder.is_symlink() else None


def note_original(card: Card, origin: Origin | None) -> Path | None:
    """Let workers of this user on this machine read what is served from where it lies; the note that says so. None
    where that cannot be: they fetch it then, as others do."""
    if origin is None:
        return None
    try:
        folder = originals_folder()
        if folder is None:
            return None
        note = OriginalNote(str(origin.path), origin.is_packed, [FileMark.of(path) for path in origin.files])
        written = folder / f"{card.fingerprint}.{os.getpid()}.new"
        written.write_bytes(msgspec.json.encode(note))
        target = folder / f"{card.fingerprint}.json"
        written.replace(target)
    except OSError as error:
        log.info("workers on this machine will fetch %s: %s", card.model, error)
        return None
    return target


def open_original(card: Card) -> Original | None:
    """The file from which the coordinator on this machine serves a model; None where it is on another one, or is not
    what it was."""
    try:
        folder = originals_folder()
        content = None if folder is None else _read(folder / f"{card.fingerprint}.json")
        if content is None:
            return None
        note = msgspec.json.decode(content, type=OriginalNote)
        if not all(mark.holds for mark in note.files):
            return None
        return Original(note, _open(note), card)
    except (OSError, ValueError, ShardComputeError) as error:
        log.info("the original of %s cannot be read here, and is fetched: %s", card.model, error)
        return None


class Original(Closing):
    """The tensors of a card that can be read from the original file, as a `TensorFile`."""

    def __init__(self, note: OriginalNote, tensors: TensorFile, card: Card) -> None:
        self._note = note
        self._tensors = tensors
        self.name = note.path
        self.entries: Mapping[str, TensorEntry] = {
            name: entry
            for name, entry in card.entries.items()
            if name in tensors.entries and _is_alike(entry, tensors.entries[name])
        }

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        return self._tensors.read_bytes(name, offset, length)

    def lasting(self, name: str) -> ByteSource | None:
        return lasting_bytes(self._tensors, name)

    def check(self) -> None:
        """CorruptModelError if a file has changed since it was noted."""
        for mark in self._note.files:
            if not mark.holds:
                raise CorruptModelError(
                    f"{mark.path} was changed while it was loaded",
                    hint="leave a model that is served as it is",
                )

    def close(self) -> None:
        self._tensors.close()


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_NOTE_BYTES)
    except FileNotFoundError:
        return None


def _open(note: OriginalNote) -> TensorFile:
    if note.is_packed:
        return open_safetensors(LocalBytes(note.path))
    # Nothing is fetched: the reference names a file or a folder.
    return open_tensors(resolve(parse_reference(note.path), load_settings()), with_tokenizer=False)


def _is_alike(one: TensorEntry, other: TensorEntry) -> bool:
    return (one.dtype, one.shape, one.size_bytes) == (other.dtype, other.shape, other.size_bytes)
