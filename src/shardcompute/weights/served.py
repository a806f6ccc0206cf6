"""Weights as they are served to machines that hold none: quantised once here, where that makes them smaller.

Whatever a form would not shrink travels as the checkpoint stores it and is converted where it arrives: float32 of
16-bit weights, int8 of 4-bit blocks. A form that shrinks a checkpoint is packed first: each of the decoder's
tensors in one file (see `weights.pack`), which is kept for the next start. A model whose files stay at the hub is never
packed: its card says where the tensors lie (`weights.source_map`), and workers read and convert their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardcompute.core.errors import CorruptModelError, UnknownModelError, UsageError
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import Stage, whole
from shardcompute.models.vocabulary import Vocabulary, encode_vocabulary, lazy_vocabulary
from shardcompute.weights.attached import AttachedTensors, is_attachment, read_attachment
from shardcompute.weights.card import Card, make_card
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.quantise import WEIGHT_FORMS
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.formats.tensor_file import TensorFile
from shardcompute.weights.loader import ShardTensors, check_stage, place_bytes
from shardcompute.weights.pack import PackedTensors, PackWriter
from shardcompute.weights.quantised.folded_file import stored_file
from shardcompute.weights.quantised.schemes import open_quantised
from shardcompute.weights.source_map import map_source
from shardcompute.weights.sources.disk import check_room, disk_errors, hold_lock
from shardcompute.weights.sources.hub_files import HubListing
from shardcompute.weights.sources.progress import NullProgress, Progress
from shardcompute.weights.sources.resolve import ModelFiles

if TYPE_CHECKING:
    from shardcompute.models.tokenizer import Tokenizer

MOST_READ_BYTES = 8 << 20
"""Of a tensor, for whoever reads a model's ends over HTTP, at once."""
VOCABULARY = "vocabulary"
"""The attachment that the last stage of a chain makes grammar masks with."""
_FORMAT = "1"
_SAMPLE_BYTES = 64
# Bits a weight takes in each form that rounds, with the float32 scale (and shift) of its block of 32.
_BITS_PER_WEIGHT = {"int8": 9.0, "int4": 6.0, "mixed": 9.2}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the tensors of a served model lie on this machine's disk: `path` is what to open, a folder or a file, and
    `files` are those that tensors are read from."""

    path: Path
    files: tuple[Path, ...]
    is_packed: bool = False


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """A model ready to be sent: its card, and the file that holds the card's tensors; `origin` where that is here."""

    card: Card
    tensors: TensorFile
    origin: Origin | None = None


def prepare_served(
    checkpoint: Checkpoint,
    form: str,
    folder: Path,
    progress: Progress | None = None,
    *,
    attachments: Mapping[str, bytes] | None = None,
) -> ServedWeights:
    """The model in `form`, packed into `folder` where that is needed and was not done before.

    The checkpoint stays open for as long as the model is served. Close `tensors` when it is over. `attachments`
    travel beside the tensors (see `weights.attached`).
    """
    if form not in WEIGHT_FORMS:
        raise UsageError(f"there is no weight form {form!r}", hint=f"use one of {', '.join(WEIGHT_FORMS)}")
    stage = whole(checkpoint.spec)
    checkpoint.check_empty()
    check_stage(checkpoint.tensors, checkpoint.layout, stage.start, stage.stop)
    stored = stored_file(checkpoint.tensors)
    if checkpoint.files.listing is not None and not checkpoint.merged:
        return _serve_from_source(checkpoint, checkpoint.files.listing, form, attachments or {})
    card = make_card(
        checkpoint.name,
        checkpoint.spec,
        checkpoint.layout,
        stored.entries,
        content=content_of(checkpoint),
        form=form,
        quantization=checkpoint.quantization,
    )
    if not _is_smaller_packed(card):
        if not attachments:
            return ServedWeights(card, stored, _origin_of(checkpoint))
        attached = AttachedTensors(stored, attachments)
        card = make_card(
            checkpoint.name,
            checkpoint.spec,
            checkpoint.layout,
            attached.entries,
            content=card.content,
            form=form,
            quantization=card.quantization,
        )
        return ServedWeights(card, attached, _origin_of(checkpoint))
    path = folder / f"{card.fingerprint}.safetensors"
    packed = _provide_packed(checkpoint, card, path, progress or NullProgress())
    tensors = AttachedTensors(packed, attachments or {})
    layout, _ = _packed_layout(checkpoint.layout)
    return ServedWeights(
        make_card(
            checkpoint.name,
            checkpoint.spec,
            layout,
            tensors.entries,
            content=tensors.metadata["sha256"],
            kind="packed",
            form=form,
        ),
        tensors,
        Origin(path.absolute(), (path.absolute(),), is_packed=True),
    )


def _serve_from_source(
    checkpoint: Checkpoint, listing: HubListing, form: str, attachments: Mapping[str, bytes]
) -> ServedWeights:
    """Workers read the stored tensors at the hub and convert them themselves; here is only what is asked for."""
    stored = stored_file(checkpoint.tensors)
    attached = AttachedTensors(stored, attachments)
    card = make_card(
        checkpoint.name,
        checkpoint.spec,
        checkpoint.layout,
        attached.entries,
        content=content_of(checkpoint),
        form=form,
        quantization=checkpoint.quantization,
    )
    source = map_source(listing, stored, (name for name in card.entries if not is_attachment(name)))
    if source is None:
        return ServedWeights(card, attached)
    content = hashlib.sha256(f"{card.content} {source.identity}".encode()).hexdigest()
    card = make_card(
        card.model,
        card.spec,
        card.layout,
        attached.entries,
        content=content,
        form=form,
        quantization=card.quantization,
        source=source,
    )
    return ServedWeights(card, attached)


def _origin_of(checkpoint: Checkpoint) -> Origin | None:
    files = checkpoint.files
    if files.folder is None or checkpoint.merged:
        return None
    folder = files.folder.absolute()
    path = folder / files.main_file if files.kind == "gguf" else folder
    return Origin(path, tuple(folder / name for name in files.weight_files))


def attachments_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What travels beside the weights of a model with this tokenizer."""
    return {VOCABULARY: encode_vocabulary(tokenizer.vocabulary())}


def served_vocabulary(tensors: TensorFile) -> Callable[[], Vocabulary]:
    """Gives the vocabulary of a model that was served with the attachments of its tokenizer."""
    content = read_attachment(tensors, VOCABULARY)
    if content is None:
        raise CorruptModelError(
            f"{tensors.name} comes without its vocabulary", hint="run the same release on every node"
        )
    return lazy_vocabulary(content)


def attach(served: ServedWeights, attachments: Mapping[str, bytes]) -> ServedWeights:
    """The same weights with other attachments; closing one of the two closes both."""
    tensors = AttachedTensors(served.tensors, attachments)
    card = served.card
    changed = make_card(
        card.model,
        card.spec,
        card.layout,
        tensors.entries,
        content=card.content,
        kind=card.kind,
        form=card.form,
        quantization=card.quantization,
        source=card.source,
    )
    return replace(served, card=changed, tensors=tensors)


def shard_source(card: Card, tensors: TensorFile, stage: Stage) -> ShardTensors | PackedTensors:
    """The decoder's tensors of one shard, from a file that holds those the card names."""
    if card.kind == "packed":
        return PackedTensors(tensors, card.layout)
    tensors = open_quantised(tensors, card.quantization)
    check_stage(tensors, card.layout, stage.start, stage.stop)
    return ShardTensors(tensors, card.layout, form=card.form)


def _packed_layout(layout: Layout) -> tuple[Layout, dict[str, tuple[str, int | None, TensorPlace]]]:
    """Where the decoder's tensors lie once packed, and by packed name what to read them from: our name, layer, place.

    A tied head is packed once.
    """
    sources: dict[str, tuple[str, int | None, TensorPlace]] = {}
    packed: dict[TensorPlace, str] = {}

    def pack(layer: int | None, name: str, place: TensorPlace) -> TensorPlace:
        stored = name if layer is None else f"layers.{layer}.{name}"
        if layer is None:
            stored = packed.setdefault(place, stored)
        sources.setdefault(stored, (name, layer, place))
        return TensorPlace(stored, place.shape)

    def pack_all(layer: int | None, places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
        return {name: pack(layer, name, place) for name, place in places.items()}

    model = pack_all(None, layout.model)
    layers = tuple(pack_all(index, places) for index, places in enumerate(layout.layers))
    return Layout(model, layers), sources


def _provide_packed(checkpoint: Checkpoint, card: Card, path: Path, progress: Progress) -> TensorFile:
    with hold_lock(path.parent / "locks" / card.fingerprint, lambda: None):
        tensors = _open_packed(path)
        if tensors is None:
            _pack(checkpoint, card, path, progress)
            tensors = _open_packed(path)
    if tensors is None:
        raise CorruptModelError(f"{path} is damaged", hint="check the disk, and delete the file")
    return tensors


def _open_packed(path: Path) -> TensorFile | None:
    """The packed file if it is there, whole and of this release's format."""
    try:
        source = LocalBytes(path)
    except UnknownModelError:
        return None
    with contextlib.ExitStack() as on_error:
        on_error.callback(source.close)
        try:
            tensors = open_safetensors(source)
        except CorruptModelError:
            return None
        if tensors.metadata.get("format") != _FORMAT or "sha256" not in tensors.metadata:
            return None
        on_error.pop_all()
        return tensors


def _pack(checkpoint: Checkpoint, card: Card, path: Path, progress: Progress) -> None:
    source = ShardTensors(checkpoint.tensors, checkpoint.layout, form=card.form)
    _, origins = _packed_layout(checkpoint.layout)
    total = sum(place_bytes(checkpoint.tensors, place) for _, _, place in origins.values())
    check_room(path.parent, _packed_bytes(card), f"{checkpoint.name} as {card.form}")
    progress.start(f"Converting {checkpoint.name} to {card.form}", total)
    try:
        with PackWriter(path, origins) as writer:
            for stored, (name, layer, place) in origins.items():
                if len(place.shape) == 1:
                    writer.add(stored, source.vector(name, layer))
                else:
                    writer.add_matrix(stored, source.matrix(name, layer))
                progress.advance(place_bytes(checkpoint.tensors, place))
            writer.finish({"format": _FORMAT, "form": card.form, "source": card.fingerprint})
    finally:
        progress.finish()


def _is_smaller_packed(card: Card) -> bool:
    matrices = [entry for entry in card.folded_entries.values() if len(entry.shape) > 1]
    stored_bytes = sum(entry.size_bytes for entry in matrices)
    return card.form in _BITS_PER_WEIGHT and _packed_bytes(card) < stored_bytes


def _packed_bytes(card: Card) -> int:
    """What the model's matrices will take, nearly."""
    weights = sum(math.prod(entry.shape) for entry in card.folded_entries.values() if len(entry.shape) > 1)
    return int(weights * _BITS_PER_WEIGHT[card.form] / 8)


def content_of(checkpoint: Checkpoint) -> str:
    """What tells these weights from others of the same shapes, without reading them all.

    A hub's commit does. Files of unknown origin are told by size, time of change and samples of every tensor.
    """
    digest = _files_digest(checkpoint.files)
    digest.update(checkpoint.merged.encode())
    if checkpoint.files.commit is None:
        _add_samples(checkpoint, digest)
    return digest.hexdigest()


def _files_digest(files: ModelFiles) -> hashlib._Hash:
    digest = hashlib.sha256()
    if files.commit is not None:
        digest.update(f"{files.name} {files.commit} {' '.join(files.weight_files)}".encode())
    elif files.folder is not None:
        for name in files.weight_files:
            with disk_errors(files.folder / name):
                found = (files.folder / name).stat()
            digest.update(f"{name} {found.st_size} {found.st_mtime_ns} ".encode())
    return digest


def weights_key(checkpoint: Checkpoint) -> str:
    """The same for the same weights, wherever they came from: told by samples of every tensor."""
    digest = hashlib.sha256()
    _add_samples(checkpoint, digest)
    return digest.hexdigest()


def _add_samples(checkpoint: Checkpoint, digest: hashlib._Hash) -> None:
    tensors = stored_file(checkpoint.tensors)
    for name, entry in sorted(tensors.entries.items()):
        length = min(_SAMPLE_BYTES, entry.size_bytes)
        for offset in (0, (entry.size_bytes - length) // 2, entry.size_bytes - length):
            digest.update(tensors.read_bytes(name, offset, length))
