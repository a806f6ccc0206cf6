"""Model cache: the models kept on this machine's disk.

    models/
      org--repo@revision=QUANT/     one entry: the model's files and a manifest, shardcompute.json
      incoming/                     what is still being fetched, and what is being removed
      locks/                        one lock file per entry, so that two processes do not fetch the same model

An entry is renamed into place when it is whole, so whatever has an entry's name is complete, unless someone
changed it afterwards: then the entry is listed as damaged, with what is wrong, and can be removed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardcompute.core.errors import UnknownModelError, UsageError
from shardcompute.weights.sources.choice import is_safe_name
from shardcompute.weights.sources.disk import check_room, disk_errors, hold_lock
from shardcompute.weights.sources.progress import NullProgress, Progress
from shardcompute.weights.sources.reference import (
    DEFAULT_REVISION,
    EmbeddedReference,
    HubReference,
    ModelReference,
    parse_hub_reference,
)

MANIFEST_FILE = "shardcompute.json"
_MANIFEST_LIMIT_BYTES = 16 << 20
_FORMAT = 1
_INCOMING = "incoming"
_LOCKS = "locks"

CachedReference = EmbeddedReference | HubReference


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of an entry; `name` is relative, with forward slashes."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an entry says about itself. `commit` is the exact version at the source, `quant` the one
    chosen."""

    format: int
    reference: str
    files: tuple[FileRecord, ...]
    created: str
    commit: str | None = None
    quant: str | None = None


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One model on disk. A damaged one has no manifest that can be trusted, and `damage` says why."""

    reference: CachedReference
    path: Path
    manifest: Manifest | None
    damage: str | None = None

    @property
    def is_damaged(self) -> bool:
        return self.manifest is None

    @property
    def hint(self) -> str:
        return f"remove it with: shardcompute rm {self.reference}" if self.is_damaged else ""

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return _tree_size(self.path)


class ModelCache:
    """The entries under one data folder. Nothing is created before something is written."""

    def __init__(self, data_dir: Path) -> None:
        self.folder = data_dir / "models"

    def list_entries(self) -> tuple[CacheEntry, ...]:
        """All entries, whole and damaged, by name."""
        with disk_errors(self.folder):
            try:
                folders = sorted(path for path in self.folder.iterdir() if path.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return ()
        references = ((path, _reference_of(path.name)) for path in folders)
        return tuple(_read_entry(reference, path) for path, reference in references if reference is not None)

    def find(self, reference: ModelReference) -> CacheEntry | None:
        """The entry of `reference`, perhaps damaged; None if there is none.

        A quantisation is also found where it was chosen for the repository as a whole.
        """
        if not isinstance(reference, CachedReference):
            return None
        path = self.folder / _key_of(reference)
        if path.is_dir():
            return _read_entry(reference, path)
        if isinstance(reference, HubReference) and reference.quant is not None:
            whole = self.find(HubReference(reference.repo, reference.revision))
            if whole is not None and whole.manifest is not None and whole.manifest.quant == reference.quant:
                return whole
        return None

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, with what is still incoming."""
        return _tree_size(self.folder)

    def remove(self, reference: ModelReference, progress: Progress | None = None) -> int:
        """Delete the entry of `reference` and what was fetched of it; gives the bytes freed."""
        if not isinstance(reference, CachedReference):
            raise UsageError(
                f"{reference} is a local model, which is not kept here", hint="delete its files yourself"
            )
        key = _key_of(reference)
        path = self.folder / key
        incoming = self.folder / _INCOMING / key
        if not path.is_dir() and not incoming.is_dir():
            raise UnknownModelError(
                f"{reference} is not on this machine", hint="list what is with: shardcompute list"
            )
        with self.lock(reference, progress or NullProgress()), disk_errors(path):
            freed = _tree_size(path) + _tree_size(incoming)
            # Renamed first: a removal that is interrupted must not leave half an entry under its name.
            doomed = self.folder / _INCOMING / f"{key}.removed"
            doomed.parent.mkdir(parents=True, exist_ok=True)
            if doomed.exists():
                shutil.rmtree(doomed)
            if path.is_dir():
                os.replace(path, doomed)
                shutil.rmtree(doomed)
            if incoming.is_dir():
                shutil.rmtree(incoming)
        return freed

    @contextlib.contextmanager
    def lock(self, reference: CachedReference, progress: Progress) -> Iterator[None]:
        """Hold `reference`'s lock; tells `progress` while another process holds it."""
        is_waiting = False

        def on_wait() -> None:
            nonlocal is_waiting
            is_waiting = True
            progress.start(f"waiting for another process that is fetching {reference}", None)

        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(hold_lock(self.folder / _LOCKS / f"{_key_of(reference)}.lock", on_wait))
            finally:
                if is_waiting:
                    progress.finish()
            yield

    def open_incoming(self, reference: CachedReference) -> Path:
        """The folder that fills up to become `reference`'s entry, with what an earlier attempt left.

        The caller holds the lock.
        """
        path = self.folder / _INCOMING / _key_of(reference)
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def check_room(self, reference: CachedReference, needed_bytes: int) -> None:
        """Raise `DiskFullError` unless `reference` fits; what an earlier attempt left counts as fitted."""
        incoming = self.open_incoming(reference)
        check_room(incoming, max(0, needed_bytes - _tree_size(incoming)), str(reference))

    def publish(
        self,
        reference: CachedReference,
        files: Iterable[FileRecord],
        *,
        commit: str | None = None,
        quant: str | None = None,
    ) -> CacheEntry:
        """Turn the incoming folder, which holds `files`, into the entry. The caller holds the lock."""
        incoming = self.open_incoming(reference)
        path = self.folder / _key_of(reference)
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        manifest = Manifest(_FORMAT, str(reference), tuple(files), created, commit, quant)
        with disk_errors(path):
            _keep_only(incoming, {record.name for record in manifest.files})
            manifest_path = incoming / MANIFEST_FILE
            manifest_path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            os.replace(incoming, path)
        return _read_entry(reference, path)


def _key_of(reference: CachedReference) -> str:
    """An entry's folder name, from which the reference can be read back even if its manifest cannot."""
    if isinstance(reference, EmbeddedReference):
        return str(reference)
    revision = "" if reference.revision == DEFAULT_REVISION else f"@{reference.revision.replace('/', '^')}"
    return f"{reference.repo.replace('/', '--')}{revision}{'=' + reference.quant if reference.quant else ''}"


def _reference_of(key: str) -> CachedReference | None:
    if key == str(EmbeddedReference()):
        return EmbeddedReference()
    named, _, quant = key.partition("=")
    repo, _, revision = named.partition("@")
    text = repo.replace("--", "/") + (f"@{revision.replace('^', '/')}" if revision else "")
    try:
        reference = parse_hub_reference(text + (f":{quant}" if quant else ""))
    except UsageError:
        return None
    return reference if _key_of(reference) == key else None


def _read_entry(reference: CachedReference, path: Path) -> CacheEntry:
    try:
        with (path / MANIFEST_FILE).open("rb") as file:
            manifest = msgspec.json.decode(file.read(_MANIFEST_LIMIT_BYTES), type=Manifest)
        damage = _damage_of(path, manifest)
    except FileNotFoundError:
        damage = f"{MANIFEST_FILE} is missing"
    except OSError as error:
        damage = f"it cannot be read: {error.strerror or error}"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        damage = f"{MANIFEST_FILE} is damaged"
    if damage is not None:
        return CacheEntry(reference, path, None, damage)
    return CacheEntry(reference, path, manifest)


def _damage_of(path: Path, manifest: Manifest) -> str | None:
    if manifest.format != _FORMAT:
        return f"{MANIFEST_FILE} was written by another version"
    if not manifest.files:
        return "it names no file"
    for record in manifest.files:
        if not is_safe_name(record.name):
            return f"{MANIFEST_FILE} is damaged"
        try:
            size = (path / record.name).stat().st_size
        except FileNotFoundError:
            return f"{record.name} is missing"
        if size != record.size:
            return f"{record.name} has {size} bytes instead of {record.size}"
    return None


def _keep_only(folder: Path, names: set[str]) -> None:
    """Delete what earlier attempts left beside the files that count."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in names:
            path.unlink()


def _tree_size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total
