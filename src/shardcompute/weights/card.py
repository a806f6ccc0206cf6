"""Model card: what a model consists of, for machines that hold none of its files.

A `Card` is all that a worker needs to know before it asks for a single weight: the spec, where the decoder's
tensors lie, and how large each stored one is. It travels as compressed JSON. Its `fingerprint` names the bytes:
two models share one only if every tensor of theirs is the same, so caches are kept under it.

`kind` says how to read the stored tensors: those of a `checkpoint` as its family's layout has it, or `packed`
ones that `weights.served` wrote, where a quantised matrix `m` lies in parts `m#codes`, `m#scales` and so on.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from shardcompute.core.errors import CorruptModelError
from shardcompute.models.layout import EMBEDDING, TOWER, Layout, TensorPlace
from shardcompute.models.spec import ModelSpec, Stage, VisionSpec
from shardcompute.models.vision.slots import tower_slots
from shardcompute.weights.adapter_pack import adapter_tensors, is_of_adapter
from shardcompute.weights.attached import is_attachment
from shardcompute.weights.formats.tensor_file import TensorEntry, block_layout
from shardcompute.weights.quantised.schemes import fold_entries, scheme_of
from shardcompute.weights.source_map import SourceMap, check_source_map

Kind = Literal["checkpoint", "packed"]
PARTS = ("codes", "scales", "shifts", "columns", "values")
_FORMAT = 1
_TEXT_LIMIT_BYTES = 64 << 20
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
_ELEMENT_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class Card:
    """One model in the form in which it is served. `content` identifies the weights themselves, `fingerprint` all but
    the adapters beside them; `entries` have no offsets, because where a tensor lies on the coordinator's disk is nobody
    else's business."""

    model: str
    fingerprint: str
    kind: Kind
    form: str
    content: str
    spec: ModelSpec
    layout: Layout
    entries: Mapping[str, TensorEntry]
    quantization: str = ""
    """How a checkpoint's matrices lie in several tensors, as JSON (see `weights.quantised.schemes`)."""
    source: SourceMap | None = None
    """Where its tensors can be read without the coordinator; part of the content, not of the fingerprint."""

    @property
    def folded_entries(self) -> Mapping[str, TensorEntry]:
        """Entries as a reader sees them, a quantised matrix as one."""
        return fold_entries(self.entries, self.quantization)

    def stored_names(self, place: TensorPlace) -> tuple[str, ...]:
        """The stored tensors from which one of the decoder's is read."""
        return _stored_names(place, self.kind, self.entries, self.quantization)

    def stage_places(self, stage: Stage) -> Iterator[TensorPlace]:
        """What a stage reads, in the order in which the decoder asks for it."""
        yield from self.layout.stage_places(stage)

    def stage_tensors(self, stage: Stage) -> tuple[str, ...]:
        """The stored tensors of a stage, each once, without those of adapters."""
        return tuple(
            dict.fromkeys(name for place in self.stage_places(stage) for name in self.stored_names(place))
        )

    def stage_adapters(self, stage: Stage) -> tuple[str, ...]:
        """The stored tensors of adapters of a stage."""
        return tuple(name for layer in range(stage.start, stage.stop) for name in self.layer_adapters(layer))

    def layer_bytes(self, layer: int) -> int:
        return self._size(self.layer_tensors(layer))

    @property
    def embedding_bytes(self) -> int:
        """What the first stage has before its layers: the table, and what sees."""
        places = [place for name, place in self.layout.model.items() if name.startswith(EMBEDDING)]
        return self._size(dict.fromkeys(name for place in places for name in self.stored_names(place)))

    @property
    def head_bytes(self) -> int:
        """The output matrix, also where it is the embedding's."""
        return self._size(self.stored_names(self.layout.model["head"]))

    def layer_tensors(self, layer: int) -> tuple[str, ...]:
        return (*self.base_tensors(layer), *self.layer_adapters(layer))

    def base_tensors(self, layer: int) -> tuple[str, ...]:
        """What is stored of a layer without adapters."""
        places = self.layout.layers[layer].values()
        return tuple(dict.fromkeys(name for place in places for name in self.stored_names(place)))

    def layer_adapters(self, layer: int) -> tuple[str, ...]:
        """What is stored of adapters of a layer."""
        return adapter_tensors(self.entries, layer)

    def stage_bytes(self, stage: Stage) -> int:
        """What travels for a whole stage."""
        return self._size((*self.stage_tensors(stage), *self.stage_adapters(stage)))

    def _size(self, names: Iterable[str]) -> int:
        return sum(self.entries[name].size_bytes for name in names)


# Made once: msgspec works out a dataclass when it first meets it, which two threads must not do at the same time.
_CARDS = msgspec.json.Decoder(Card)


def make_card(
    model: str,
    spec: ModelSpec,
    layout: Layout,
    entries: Mapping[str, TensorEntry],
    *,
    content: str,
    kind: Kind = "checkpoint",
    form: str = "native",
    quantization: str = "",
    source: SourceMap | None = None,
) -> Card:
    """The card of a model whose weights `content` identifies; stored tensors that no place names are left out, but
    for attachments (see `weights.attached`)."""
    layout = Layout(dict(layout.model), tuple(dict(layer) for layer in layout.layers))
    used: dict[str, TensorEntry] = {}
    for place in _places(layout):
        for name in _stored_names(place, kind, entries, quantization):
            if name not in entries:
                raise _malformed(model, f"lacks the tensor {name!r}")
            used[name] = replace(entries[name], offset=0)
    used |= {name: replace(entry, offset=0) for name, entry in entries.items() if is_attachment(name)}
    card = Card(model, "", kind, form, content, spec, layout, used, quantization, source)
    return replace(card, fingerprint=_fingerprint(card))


def encode_card(card: Card) -> bytes:
    return zlib.compress(msgspec.json.encode(card))


def decode_card(encoded: bytes | memoryview) -> Card:
    """The card, complete and in agreement with itself; `CorruptModelError` for anything else."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(encoded, _TEXT_LIMIT_BYTES)
        if not unpacker.eof:
            raise _malformed("the model", "is cut short or far too long")
        card = _CARDS.decode(text)
    except (zlib.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _malformed("the model", f"cannot be read: {error}") from error
    _check(card)
    return card


def row_range(entry: TensorEntry, start: int, stop: int | None) -> tuple[int, int]:
    """Offset and length in bytes of `[start, stop)` along the first axis; `CorruptModelError` outside of it."""
    count = entry.shape[0] if entry.shape else 1
    stop = count if stop is None else stop
    if not 0 <= start <= stop <= count:
        raise CorruptModelError(
            f"rows {start} to {stop} of {entry.name!r} do not exist: it has {count}",
            hint="the card and the weights may belong to different models",
        )
    step = entry.size_bytes // count if count else 0
    return start * step, (stop - start) * step


def _stored_names(
    place: TensorPlace, kind: Kind, entries: Mapping[str, TensorEntry], quantization: str
) -> tuple[str, ...]:
    if quantization:
        return scheme_of(quantization).parts(place.stored, entries)
    if kind == "checkpoint" or place.stored in entries:
        return (place.stored,)
    parts = tuple(f"{place.stored}#{part}" for part in PARTS)
    # Codes and scales belong to every quantised matrix, so that a missing one shows.
    return parts[:2] + tuple(part for part in parts[2:] if part in entries)


def _places(layout: Layout) -> Iterator[TensorPlace]:
    yield from layout.model.values()
    for layer in layout.layers:
        yield from layer.values()


def _fingerprint(card: Card) -> str:
    subject = (
        _FORMAT,
        card.kind,
        card.form,
        card.content,
        card.spec,
        card.layout,
        # What adapters add is fetched beside the same weights; the names of their tensors hold their hashes.
        {name: entry for name, entry in card.entries.items() if not is_of_adapter(name)},
        card.quantization,
    )
    return hashlib.sha256(msgspec.json.encode(subject, order="deterministic")).hexdigest()


def _check(card: Card) -> None:
    if len(card.layout.layers) != card.spec.layer_count:
        raise _malformed(card.model, f"places {len(card.layout.layers)} layers of {card.spec.layer_count}")
    for name in ("embedding", "norm", "head"):
        if name not in card.layout.model:
            raise _malformed(card.model, f"does not say where its {name} lies")
    if card.spec.vision is not None:
        _check_tower(card, card.spec.vision)
    for place in _places(card.layout):
        for name in card.stored_names(place):
            if name not in card.entries:
                raise _malformed(card.model, f"lacks the tensor {name!r}")
    for name, entry in card.entries.items():
        if name != entry.name or entry.offset or min((entry.size_bytes, *entry.shape)) < 0:
            raise _malformed(card.model, f"describes {name!r} wrongly")
        expected = _expected_bytes(entry)
        if expected is not None and entry.size_bytes != expected:
            raise _malformed(card.model, f"gives {name!r} {entry.size_bytes} bytes instead of {expected}")
    if card.source is not None:
        check_source_map(card.source, card.entries)
    if card.fingerprint != _fingerprint(card):
        raise _malformed(card.model, "has a fingerprint that is not its own")


def _check_tower(card: Card, vision: VisionSpec) -> None:
    sizes = (vision.layers, vision.hidden, vision.heads, vision.intermediate, vision.merge, vision.frames)
    if min(*sizes, vision.patch) < 1 or vision.hidden % vision.heads or vision.layers > len(card.entries):
        raise _malformed(card.model, "describes a tower that cannot be")
    for name, shape in tower_slots(vision, card.spec.hidden):
        place = card.layout.model.get(f"{TOWER}{name}")
        if place is None or place.shape != shape:
            raise _malformed(card.model, f"does not say where its tower's {name} lies")


def _expected_bytes(entry: TensorEntry) -> int | None:
    """What a tensor of this type and shape takes; None for types that nothing here reads."""
    elements = math.prod(entry.shape)
    if entry.dtype in _ELEMENT_BYTES:
        return elements * _ELEMENT_BYTES[entry.dtype]
    blocks = block_layout(entry.dtype)
    if blocks is None or not entry.shape or entry.shape[-1] % blocks.file_block:
        return None
    return elements // blocks.file_block * blocks.file_bytes


def _malformed(model: str, fault: str) -> CorruptModelError:
    return CorruptModelError(
        f"the card of {model} {fault}", hint="run the same release on every node, and join again"
    )
