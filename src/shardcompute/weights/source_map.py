"""Source map: where at the hub the tensors of a model lie, so that whoever needs some reads them there.

It names a repository at one commit, its files with sizes and hashes as the hub tells them, and for each stored tensor
the strands that it is made of. It travels on the model's card; where the hub is, and by what right it is asked, is each
reader's own business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardcompute.core.errors import CorruptModelError, UsageError
from shardcompute.weights.formats.tensor_file import LocatedTensors, Span, TensorEntry, TensorFile
from shardcompute.weights.sources.choice import is_safe_name
from shardcompute.weights.sources.hub_files import HubFile, HubListing
from shardcompute.weights.sources.reference import parse_hub_reference

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_FILES = 4096
_MOST_STRANDS = 8

Place = tuple[tuple[int, int, int], ...]
"""Strands, each a file's number, an offset in it and the bytes of a unit."""


@dataclass(frozen=True, slots=True)
class SourceMap:
    """Where tensors lie in the files of a repository at one commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]
    places: Mapping[str, Place]

    @property
    def listing(self) -> HubListing:
        return HubListing(self.repo, self.commit, {file.name: file for file in self.files})

    @property
    def identity(self) -> str:
        """What tells these weights from others: the commit, and size and hash of every file."""
        files = " ".join(f"{file.name}:{file.size}:{file.sha256 or '?'}" for file in self.files)
        return f"{self.repo} {self.commit} {files}"

    def ranges(self, tensor: str, span: Span) -> Iterator[tuple[int, int, int]]:
        """What to read of which file for a span of a tensor: file, offset and length, one for each strand."""
        place = self.places[tensor]
        if not place[0][2]:
            file, offset, _ = place[0]
            yield file, offset + span[0], span[1] - span[0]
            return
        first, last = units_of(place, span)
        for file, offset, unit_bytes in place:
            yield file, offset + first * unit_bytes, (last - first) * unit_bytes


def units_of(place: Place, span: Span) -> Span:
    """Which units of a woven tensor hold these of its bytes."""
    size = sum(unit_bytes for _, _, unit_bytes in place)
    return span[0] // size, -(-span[1] // size)


def map_source(listing: HubListing, tensors: TensorFile, names: Iterable[str]) -> SourceMap | None:
    """Where the tensors `names` lie; None where the file does not know."""
    if not isinstance(tensors, LocatedTensors):
        return None
    files: dict[str, int] = {}
    places: dict[str, Place] = {}
    for name in names:
        places[name] = tuple(
            (
                files.setdefault(strand.file.removeprefix(f"{listing.repo}/"), len(files)),
                strand.offset,
                strand.unit_bytes,
            )
            for strand in tensors.locate(name)
        )
    return SourceMap(listing.repo, listing.commit, tuple(listing.files[name] for name in files), places)


def check_source_map(source: SourceMap, entries: Mapping[str, TensorEntry]) -> None:
    """CorruptModelError unless every tensor lies inside a file that a hub could have."""
    try:
        parse_hub_reference(f"{source.repo}@{source.commit}")
    except UsageError as error:
        raise _malformed(source, f"names no repository: {error.message}") from error
    if not _COMMIT.fullmatch(source.commit) or len(source.files) > _MOST_FILES:
        raise _malformed(source, "names no commit, or far too many files")
    for file in source.files:
        is_hash = file.sha256 is None or _SHA256.fullmatch(file.sha256)
        if not is_safe_name(file.name) or not is_hash or file.size < 0:
            raise _malformed(source, f"describes the file {file.name[:200]!r} wrongly")
    for name, place in source.places.items():
        if name not in entries or not _lies_inside(place, entries[name].size_bytes, source.files):
            raise _malformed(source, f"says wrongly where {name[:200]!r} lies")


def _lies_inside(place: Place, size_bytes: int, files: tuple[HubFile, ...]) -> bool:
    is_woven = len(place) > 1
    if not 1 <= len(place) <= _MOST_STRANDS or any(bool(unit) != is_woven for _, _, unit in place):
        return False
    if min(min(strand) for strand in place) < 0 or max(file for file, _, _ in place) >= len(files):
        return False
    whole = sum(unit for _, _, unit in place)
    if is_woven and size_bytes % whole:
        return False
    return all(
        offset + (size_bytes // whole * unit if is_woven else size_bytes) <= files[file].size
        for file, offset, unit in place
    )


def _malformed(source: SourceMap, fault: str) -> CorruptModelError:
    return CorruptModelError(
        f"the source of {source.repo[:100]!r} {fault}", hint="run the same release on every node"
    )
