"""Outlines of models that stay at a hub, kept on disk, so that one that is served opens again while the hub is out of
reach: the listing, small files, and what was read of the weights' files to open them.

    <data_dir>/outlines/<key>.outline    one record, written whole; the newest of a repository counts
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from shardcompute.core.errors import SourceError
from shardcompute.weights.formats.bytes import ByteSource, check_range
from shardcompute.weights.sources.disk import disk_errors
from shardcompute.weights.sources.hub_files import HubFile, HubListing
from shardcompute.weights.sources.reference import HubReference

log = logging.getLogger(__name__)
_MOST_BYTES = 256 << 20
_MOST_OUTLINES = 64


class ReadRange(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file from `start` on."""

    start: int
    content: bytes

    def has(self, offset: int, length: int) -> bool:
        return self.start <= offset and offset + length <= self.start + len(self.content)


class RemoteOutline(msgspec.Struct, frozen=True, kw_only=True):
    """A model at a hub: all that opening it took."""

    hub_url: str
    repo: str
    revision: str
    quant: str | None
    commit: str
    files: dict[str, tuple[int, str | None]]
    """Size and SHA-256 of each."""
    texts: dict[str, bytes]
    ranges: dict[str, list[ReadRange]]

    @property
    def listing(self) -> HubListing:
        files = {name: HubFile(name, size, sha256) for name, (size, sha256) in self.files.items()}
        return HubListing(self.repo, self.commit, files)


class RangeRecorder:
    """What is read of remote files until it is kept, within bounds. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[str, list[ReadRange]] | None = {}
        self._size_bytes = 0

    def note(self, name: str, offset: int, content: memoryview) -> None:
        with self._lock:
            if self._ranges is None:
                return
            self._size_bytes += len(content)
            if self._size_bytes > _MOST_BYTES:
                self._ranges = None
                return
            self._ranges.setdefault(name, []).append(ReadRange(offset, bytes(content)))

    def take(self) -> dict[str, list[ReadRange]] | None:
        """All that was read; nothing more is noted. None where that was too much, or has been taken."""
        with self._lock:
            ranges, self._ranges = self._ranges, None
            return ranges


class RecordedBytes:
    """A remote file whose reading is noted."""

    def __init__(self, source: ByteSource, filename: str, recorder: RangeRecorder) -> None:
        self.name = source.name
        self.size = source.size
        self._source = source
        self._filename = filename
        self._recorder = recorder

    def read(self, offset: int, length: int) -> memoryview:
        content = self._source.read(offset, length)
        self._recorder.note(self._filename, offset, content)
        return content

    def close(self) -> None:
        self._source.close()


class OutlinedBytes:
    """A remote file of which some ranges are here; what `open_remote` opens reads the others when they are needed."""

    def __init__(
        self, name: str, size: int, ranges: Sequence[ReadRange], open_remote: Callable[[], ByteSource]
    ) -> None:
        self.name = name
        self.size = size
        self._ranges = ranges
        self._open_remote = open_remote
        self._remote: ByteSource | None = None

    def read(self, offset: int, length: int) -> memoryview:
        check_range(self.name, self.size, offset, length)
        for each in self._ranges:
            if each.has(offset, length):
                return memoryview(each.content)[offset - each.start : offset - each.start + length]
        if self._remote is None:
            self._remote = self._open_remote()
        return self._remote.read(offset, length)

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()


class OutlineStore:
    """Those of one machine, of one hub."""

    def __init__(self, data_dir: Path, hub_url: str) -> None:
        self._folder = data_dir / "outlines"
        self._hub_url = hub_url

    def find(self, reference: HubReference) -> RemoteOutline | None:
        """Of the revision or commit that is meant; None where there is none, or it cannot be read."""
        path = self._path(reference)
        try:
            with disk_errors(path), path.open("rb") as file:
                content = file.read(2 * _MOST_BYTES + 1)
            outline = msgspec.msgpack.decode(content, type=RemoteOutline)
        except (SourceError, msgspec.MsgspecError, ValueError, RecursionError):
            return None
        is_same = (outline.hub_url, outline.repo, outline.quant) == (
            self._hub_url,
            reference.repo,
            reference.quant,
        )
        return outline if is_same and reference.revision in (outline.revision, outline.commit) else None

    def keep(
        self,
        reference: HubReference,
        listing: HubListing,
        texts: Mapping[str, bytes],
        ranges: dict[str, list[ReadRange]],
    ) -> None:
        """Best effort: without it the model cannot be opened while its hub is out of reach, and nothing else."""
        outline = RemoteOutline(
            hub_url=self._hub_url,
            repo=reference.repo,
            revision=reference.revision,
            quant=reference.quant,
            commit=listing.commit,
            files={file.name: (file.size, file.sha256) for file in listing.files.values()},
            texts=dict(texts),
            ranges=ranges,
        )
        path = self._path(reference)
        written = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            with disk_errors(path):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                written.write_bytes(msgspec.msgpack.encode(outline))
                written.replace(path)
                self._drop_oldest()
        except SourceError as error:
            log.warning("what opening %s took is not kept: %s", reference, error)
            written.unlink(missing_ok=True)

    def _drop_oldest(self) -> None:
        known = sorted(self._folder.glob("*.outline"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in known[_MOST_OUTLINES:]:
            path.unlink(missing_ok=True)

    def _path(self, reference: HubReference) -> Path:
        named = f"{self._hub_url} {reference.repo} {reference.quant or ''}"
        return self._folder / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.outline"
