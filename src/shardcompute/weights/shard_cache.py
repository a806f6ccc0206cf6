"""Shard cache: fetched weights on a worker's disk, so that nothing travels twice.

    <fingerprint>/            one model in one form, as its card identifies it
      card                    the card, so that what lies here can be told and served after a restart
      <tensor>.<start>-<stop> a range of a tensor's bytes, and its SHA-256 behind them
      <tensor>.sha256         the hash of a tensor that was found whole and right
      <tensor>.<start>-<stop>.sha256   the same of a part of it, which is all that a tensor rank fetches

Each range appears under its name only when it was written, so a fetch that was cut off goes on where it
stopped. A range is checked when it is first read and deleted if it is damaged: then it is simply missing. Two
processes may use one folder: they write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcompute.core.errors import CorruptModelError, SourceError, UsageError
from shardcompute.security.private_files import close_to_others, private_opener
from shardcompute.weights.card import Card, decode_card, encode_card, row_range
from shardcompute.weights.formats.bytes import ByteSource, check_range
from shardcompute.weights.formats.tensor_file import Span, TensorEntry
from shardcompute.weights.sources.disk import check_room, disk_errors

_CARD_FILE = "card"
_DIGEST_BYTES = 32
_HASHED_BYTES = 4 << 20
_RANGE = re.compile(r"([0-9a-f]{32})\.(\d+)-(\d+)")
_VERIFIED = re.compile(r"([0-9a-f]{32})(?:\.(\d+)-(\d+))?\.sha256")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Held:
    """Layers `[start, stop)` of a model that lie here whole."""

    model: str
    fingerprint: str
    start: int
    stop: int


class ShardCache:
    """Everything fetched on this machine, under one folder. Nothing is created before something is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        close_to_others(folder)
        self._lock = threading.Lock()
        self._open: dict[str, CachedShard] = {}

    def open(self, card: Card) -> CachedShard:
        """The place of one model's tensors, with what is there already, also from when it had other adapters. Raises
        SourceError or DiskFullError."""
        folder = self.folder / card.fingerprint
        with self._lock:
            shard = self._open.get(card.fingerprint)
            if shard is None or shard.card.entries != card.entries or not folder.is_dir():
                with disk_errors(folder):
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    folder.mkdir(mode=0o700, exist_ok=True)
                _write_whole(folder / _CARD_FILE, encode_card(card))
                shard = self._open[card.fingerprint] = CachedShard(card, folder)
            return shard

    def find(self, fingerprint: str) -> CachedShard | None:
        """What lies here of one model; None without a readable card."""
        with self._lock:
            shard = self._open.get(fingerprint)
            if shard is None and _FINGERPRINT.fullmatch(fingerprint):
                folder = self.folder / fingerprint
                with contextlib.suppress(OSError, CorruptModelError, SourceError):
                    card = decode_card((folder / _CARD_FILE).read_bytes())
                    if card.fingerprint == fingerprint:
                        shard = self._open[fingerprint] = CachedShard(card, folder)
            return shard

    def shards(self) -> tuple[CachedShard, ...]:
        """All models of which something lies here."""
        with disk_errors(self.folder):
            try:
                names = sorted(path.name for path in self.folder.iterdir())
            except FileNotFoundError:
                return ()
        found = (self.find(name) for name in names)
        return tuple(shard for shard in found if shard is not None)

    def holdings(self) -> tuple[Held, ...]:
        """Which layers of which models need not be fetched any more, in as few ranges as possible."""
        return tuple(held for shard in self.shards() for held in shard.holdings())

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return _size_of(self.folder)

    def evict(self, fingerprint: str) -> int:
        """Delete what was fetched under `fingerprint`; gives the bytes freed."""
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise UsageError(f"{fingerprint!r} is no fingerprint", hint="use one that the cache lists")
        folder = self.folder / fingerprint
        freed = _size_of(folder)
        with self._lock:
            self._open.pop(fingerprint, None)
        with disk_errors(folder), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        return freed


class CachedTensor:
    """A tensor in the cache, read for long after it was fetched (see `weights.formats.bytes.ByteSource`)."""

    def __init__(self, shard: CachedShard, name: str) -> None:
        self._shard = shard
        self._tensor = name
        self.name = f"{name} in {shard.folder}"
        self.size = shard.card.entries[name].size_bytes

    def read(self, offset: int, length: int) -> memoryview:
        content = self._shard.read(self._tensor, offset, length)
        if content is None:
            raise CorruptModelError(
                f"{self.name} was deleted or damaged while it was in use",
                hint="leave the folder of a worker that runs as it is, and restart it",
            )
        return content

    def close(self) -> None:
        """No file is held open."""


class CachedShard:
    """What is here of one model. Methods may be called from any thread."""

    def __init__(self, card: Card, folder: Path) -> None:
        self.card = card
        self.folder = folder
        self._keys = {name: hashlib.sha256(name.encode()).hexdigest()[:32] for name in card.entries}
        self._lock = threading.Lock()
        self._spans: dict[str, list[Span]] = {name: [] for name in card.entries}
        self._verified: dict[str, set[Span]] = {name: set() for name in card.entries}
        self._checked: set[Path] = set()
        self._scan()

    def missing(self, name: str, start: int, stop: int) -> list[Span]:
        """The parts of `[start, stop)` that are not here."""
        gaps = []
        with self._lock:
            for first, last in sorted(self._spans[name]):
                if start < min(first, stop):
                    gaps.append((start, min(first, stop)))
                start = max(start, last)
        return [*gaps, (start, stop)] if start < stop else gaps

    def read(self, name: str, offset: int, length: int) -> memoryview | None:
        """Those bytes, or None if some are not here or turn out to be damaged."""
        check_range(name, self.card.entries[name].size_bytes, offset, length)
        out = memoryview(bytearray(length))
        at, stop = offset, offset + length
        while at < stop:
            with self._lock:
                span = max(
                    (span for span in self._spans[name] if span[0] <= at < span[1]),
                    key=lambda span: span[1],
                    default=None,
                )
            if span is None:
                return None
            last = min(stop, span[1])
            if not self._read_into(name, span, at - span[0], out[at - offset : last - offset]):
                self._forget(name, span)
                return None
            at = last
        return out

    def lasting(self, name: str) -> ByteSource | None:
        """The bytes of a tensor that was found whole and right; None where it was not."""
        return CachedTensor(self, name) if self.is_verified(name) else None

    def write(self, name: str, start: int, content: bytes | memoryview) -> None:
        """Keep bytes of a tensor, from its byte `start` on. Raises DiskFullError before the disk is full."""
        span = (start, start + len(content))
        check_range(name, self.card.entries[name].size_bytes, start, len(content))
        check_room(self.folder, len(content), f"a part of {self.card.model}")
        path = self._path(name, span)
        self._unmark(name, span)  # these bytes were not there when the tensor was found right
        _write_whole(path, content, hashlib.sha256(content).digest())
        with self._lock:
            self._checked.discard(path)
            if span not in self._spans[name]:
                self._spans[name].append(span)

    def sha256(self, name: str, span: Span | None = None) -> bytes | None:
        """The hash of a tensor, or of a part of it, of which all is here; None if something is missing or damaged."""
        digest = hashlib.sha256()
        first, last = span or self._all_of(name)
        for start in range(first, last, _HASHED_BYTES):
            part = self.read(name, start, min(_HASHED_BYTES, last - start))
            if part is None:
                return None
            digest.update(part)
        return digest.digest()

    def mark_verified(self, name: str, digest: bytes, span: Span | None = None) -> None:
        """The tensor, or this part of it, is all here and its hash is what its origin says."""
        span = span or self._all_of(name)
        _write_whole(self._mark(name, span), digest)
        with self._lock:
            self._verified[name].add(span)

    def is_verified(self, name: str, span: Span | None = None) -> bool:
        """True if the tensor, or this part of it, is all here and was found right, by itself or as part of more."""
        start, stop = span or self._all_of(name)
        with self._lock:
            is_marked = any(first <= start and stop <= last for first, last in self._verified[name])
        return is_marked and not self.missing(name, start, stop)

    def drop(self, name: str, span: Span | None = None) -> None:
        """Forget all of a tensor, or all that has to do with this part of it."""
        span = span or self._all_of(name)
        with self._lock:
            spans = [each for each in self._spans[name] if _overlap(each, span)]
        for each in spans:
            self._forget(name, each)

    def holdings(self) -> Iterator[Held]:
        """Ranges of layers that are here whole, whatever adapters they have."""
        start = 0
        count = self.card.spec.layer_count
        for layer in range(count + 1):
            if layer < count and all(map(self.is_verified, self.card.base_tensors(layer))):
                continue
            if start < layer:
                yield Held(self.card.model, self.card.fingerprint, start, layer)
            start = layer + 1

    def _scan(self) -> None:
        names = {key: name for name, key in self._keys.items()}
        with disk_errors(self.folder), os.scandir(self.folder) as files:
            for file in files:
                if (match := _VERIFIED.fullmatch(file.name)) and match[1] in names:
                    name = names[match[1]]
                    part = (int(match[2]), int(match[3])) if match[2] else self._all_of(name)
                    self._verified[name].add(part)
                elif (match := _RANGE.fullmatch(file.name)) and match[1] in names:
                    span = (int(match[2]), int(match[3]))
                    if file.stat().st_size == span[1] - span[0] + _DIGEST_BYTES:
                        self._spans[names[match[1]]].append(span)

    def _path(self, name: str, span: Span) -> Path:
        return self.folder / f"{self._keys[name]}.{span[0]}-{span[1]}"

    def _mark(self, name: str, span: Span) -> Path:
        part = "" if span == self._all_of(name) else f".{span[0]}-{span[1]}"
        return self.folder / f"{self._keys[name]}{part}.sha256"

    def _all_of(self, name: str) -> Span:
        return 0, self.card.entries[name].size_bytes

    def _read_into(self, name: str, span: Span, offset: int, out: memoryview) -> bool:
        """Fill `out` from a range's file; False if that cannot be done or the file is damaged."""
        path = self._path(name, span)
        try:
            with path.open("rb", buffering=0) as file:
                if path not in self._checked:
                    content = memoryview(file.read())
                    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
                        return False
                    self._checked.add(path)
                    out[:] = content[offset : offset + len(out)]
                    return True
                file.seek(offset)
                return file.readinto(out) == len(out)
        except (OSError, ValueError):
            return False

    def _forget(self, name: str, span: Span) -> None:
        path = self._path(name, span)
        self._unmark(name, span)
        with self._lock:
            self._checked.discard(path)
            if span in self._spans[name]:
                self._spans[name].remove(span)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _unmark(self, name: str, span: Span) -> None:
        with self._lock:
            doubted = {each for each in self._verified[name] if _overlap(each, span)}
            self._verified[name] -= doubted
        for each in doubted:
            with contextlib.suppress(OSError):
                self._mark(name, each).unlink(missing_ok=True)


class CachedTensors:
    """A `TensorFile` over what a worker holds, to serve other workers from: tensors that were found right, or the parts
    of them that were. `SourceError` for the others.
    """

    def __init__(self, shard: CachedShard) -> None:
        self._shard = shard
        self.name = f"the cached part of {shard.card.model}"
        self.entries: Mapping[str, TensorEntry] = shard.card.entries
        self.metadata: Mapping[str, Any] = {}

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        is_right = self._shard.is_verified(name, (offset, offset + length))
        found = self._shard.read(name, offset, length) if is_right else None
        if found is None:
            raise SourceError(f"{name!r} is not in {self.name}", hint="fetch it from the coordinator")
        return found

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        return self.read_bytes(name, *row_range(self.entries[name], start, stop))

    def close(self) -> None:
        """Nothing is held open."""


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _size_of(folder: Path) -> int:
    total = 0
    with disk_errors(folder):
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a range may just be taking its name
                total += path.stat().st_size if path.is_file() else 0
    return total


def _write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a small file that appears only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with disk_errors(path, lambda: sum(map(len, parts))):
        try:
            with open(partial, "wb", opener=private_opener) as file:
                for part in parts:
                    file.write(part)
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
