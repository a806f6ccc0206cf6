"""Held sizes of a model: what its layers and ends take in memory by each holder, from what its files say of tensors.

Nothing is read. What the loader makes of a stored tensor (`weights.loader`, `weights.formats.quantise`) is said here
once more as arithmetic; a test holds both together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardcompute.backends.footprint import (
    FLOAT32,
    HOLDERS,
    SEEING_HOLDERS,
    STATE_SESSIONS,
    MatrixForm,
    StepShape,
    fallback_element_bytes,
    fallback_scratch_bytes,
    head_scratch_bytes,
    held_adapter_bytes,
    held_form,
    held_kv_bytes,
    matrix_bytes,
    scratch_bytes,
    table_bytes,
    tower_scratch_bytes,
)
from shardcompute.core.kv_types import KV_TYPES, KvType
from shardcompute.models.families import EMBEDDING, SHARED, is_fallback
from shardcompute.models.layout import TOWER, Layout, TensorPlace
from shardcompute.models.spec import ModelSpec
from shardcompute.weights.card import Card
from shardcompute.weights.formats.quantise import INT8_BLOCK_SIZES, OUTLIERS_PER_COLUMN
from shardcompute.weights.formats.quantise_int4 import BLOCK_SIZE
from shardcompute.weights.formats.tensor_file import TensorEntry, block_layout
from shardcompute.weights.loader import NEVER_INT4, NEVER_ROUNDED, stays_in_file
from shardcompute.weights.quantised.folded_file import FoldedEntries

_DENSE_BITS = {"F32": 32, "F16": 16, "BF16": 16}
FormOf = Callable[[str, TensorPlace], tuple[MatrixForm, int]]
"""The form in which a matrix comes to a backend, and its bytes in the file, by our name and where it lies."""


@dataclass(frozen=True, slots=True)
class HeldSizes:
    """What a model takes with one holder; `scratch_bytes` for every stage, `head_scratch_bytes` for the last one
    besides, `kv_bytes` by type of KV for a token in a layer. `table_bytes` is the embedding where it does not stay in
    its file: tensor ranks hold rows of it."""

    holder: str
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    kv_bytes: tuple[tuple[KvType, int], ...]
    scratch_bytes: int
    head_scratch_bytes: int
    table_bytes: int = 0


def held_sizes_of_card(card: Card, *, context_length: int) -> tuple[HeldSizes, ...]:
    """By every holder that is known."""
    form_of, entries = _forms_of_card(card), card.folded_entries
    in_file = card.kind != "packed" and _has_table_in_file(card.spec, card.layout, entries, card.form)
    sizes = _held_sizes(card.spec, card.layout, form_of, context_length, in_file)
    return with_held_adapters(
        sizes,
        [
            sum(card.entries[name].size_bytes for name in card.layer_adapters(layer))
            for layer in range(card.spec.layer_count)
        ],
    )


def _forms_of_card(card: Card) -> FormOf:
    entries = card.folded_entries

    def form_of(name: str, place: TensorPlace) -> tuple[MatrixForm, int]:
        stored = card.stored_names(place)
        if card.kind == "packed" and len(stored) > 1:
            return _packed_form(place, entries), sum(entries[each].size_bytes for each in stored)
        wanted = "native" if card.kind == "packed" else card.form
        form = loaded_form(name, place, stored_form(entries, place.stored), wanted)
        return form, _share(entries[place.stored], place)

    return form_of


def with_held_adapters(sizes: tuple[HeldSizes, ...], stored_bytes: Sequence[int]) -> tuple[HeldSizes, ...]:
    """With adapters that have so many bytes in each layer."""
    if not any(stored_bytes):
        return sizes
    added = [held_adapter_bytes(each) for each in stored_bytes]
    return tuple(
        replace(each, layer_bytes=tuple(map(sum, zip(each.layer_bytes, added, strict=True))))
        for each in sizes
    )


def held_sizes_of_entries(
    spec: ModelSpec, layout: Layout, entries: Mapping[str, TensorEntry], form: str, *, context_length: int
) -> tuple[HeldSizes, ...]:
    """The same of a checkpoint that is to be served in `form`."""

    def form_of(name: str, place: TensorPlace) -> tuple[MatrixForm, int]:
        found = loaded_form(name, place, stored_form(entries, place.stored), form)
        return found, _share(entries[place.stored], place)

    in_file = _has_table_in_file(spec, layout, entries, form)
    return _held_sizes(spec, layout, form_of, context_length, in_file)


def _has_table_in_file(
    spec: ModelSpec, layout: Layout, entries: Mapping[str, TensorEntry], form: str
) -> bool:
    """Whether the loader leaves the embedding where it is stored, for what looks rows up there."""
    if is_fallback(spec) or isinstance(entries, FoldedEntries):
        return False
    table = layout.model["embedding"]
    return stays_in_file(table, entries[table.stored], form)


def loaded_form(name: str, place: TensorPlace, stored: MatrixForm, form: str) -> MatrixForm:
    """What a matrix that reads as `stored` is made into on the way to the kernels, see `quantise.convert`."""
    width = place.shape[-1]
    if name in NEVER_ROUNDED or form == "float32":
        return FLOAT32
    if name.startswith(TOWER):
        return stored
    is_block = stored.block_size > 0
    if form == "int4" and name.endswith(NEVER_INT4) and not (is_block and stored.bits == 4):
        form = "int8"
    if form == "native":
        return stored
    if form == "int4" and width % BLOCK_SIZE == 0:
        is_so = (stored.bits, stored.block_size) == (4, BLOCK_SIZE)
        return stored if is_so else MatrixForm(4, BLOCK_SIZE, has_shifts=True)
    size = next((size for size in INT8_BLOCK_SIZES if width % size == 0), None)
    if size is None:
        return FLOAT32
    if form == "mixed":
        return MatrixForm(8, size, outliers=OUTLIERS_PER_COLUMN)
    return MatrixForm(8, stored.block_size, stored.has_shifts) if is_block else MatrixForm(8, size)


def column_block(layout: Layout, entries: Mapping[str, TensorEntry], form: str) -> int:
    """By what the inner columns of feed-forward blocks are cut, so that no quantised block of any layer is."""

    def form_of(name: str, place: TensorPlace) -> tuple[MatrixForm, int]:
        return loaded_form(name, place, stored_form(entries, place.stored), form), 0

    return _column_block(layout, form_of)


def card_column_block(card: Card) -> int:
    """The same of a model as it is served."""
    return _column_block(card.layout, _forms_of_card(card))


def _column_block(layout: Layout, form_of: FormOf) -> int:
    downs = (each for places in layout.layers for each in places.items() if each[0].endswith(".down"))
    return math.lcm(1, *{form_of(name, place)[0].block_size or 1 for name, place in downs})


def held_in_words(form: MatrixForm) -> dict[str, str]:
    """As what matrices that read as `form` are held, by holder, where they are loaded as the file has them. Codes and
    scales are the file's own; only GPUs round scales, shifts and plain numbers, to 16 bits."""
    held = {holder: held_form(holder, form) for holder in HOLDERS}
    return {holder: "as the file has them" if each is None else each.words for holder, each in held.items()}


def stored_form(entries: Mapping[str, TensorEntry], name: str) -> MatrixForm:
    """What reading a matrix gives, before it is made into another form."""
    if isinstance(entries, FoldedEntries) and (form := entries.form(name)) is not None:
        return form
    return _stored_form(entries[name].dtype)


def _stored_form(dtype: str) -> MatrixForm:
    layout = block_layout(dtype)
    if layout is not None:
        return MatrixForm(layout.bits, layout.block_size, layout.has_shifts)
    return MatrixForm(_DENSE_BITS.get(dtype, 32))


def _packed_form(place: TensorPlace, entries: Mapping[str, TensorEntry]) -> MatrixForm:
    _, blocks, code_bytes = entries[f"{place.stored}#codes"].shape
    size = place.shape[-1] // max(1, blocks)
    columns = entries.get(f"{place.stored}#columns")
    outliers = 0.0 if columns is None else columns.shape[0] / place.shape[-1]
    return MatrixForm(8 * code_bytes // max(1, size), size, f"{place.stored}#shifts" in entries, outliers)


def _share(entry: TensorEntry, place: TensorPlace) -> int:
    whole = math.prod(entry.shape)
    return entry.size_bytes * math.prod(place.shape) // whole if whole else 0


def _held_sizes(
    spec: ModelSpec, layout: Layout, form_of: FormOf, context_length: int, is_table_in_file: bool
) -> tuple[HeldSizes, ...]:
    intermediate = spec.intermediate
    if spec.experts is not None:
        intermediate = max(intermediate, spec.experts.intermediate, spec.experts.shared_intermediate)
    shape = StepShape(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=intermediate,
        vocab_size=spec.vocab_size,
        context_length=min(context_length, spec.context_length),
    )
    if is_fallback(spec):
        return tuple(_held_by_fallback(holder, spec, shape, layout) for holder in HOLDERS)
    # Experts of a layer are alike: each kind of matrix is measured once.
    layers = [Counter(_forms(each, form_of).values()) for each in layout.layers]
    ends = _forms({name: layout.model[name] for name in ("embedding", "head", "norm")}, form_of)
    seeing = {name: place for name, place in layout.model.items() if name.startswith(TOWER)}
    tower = Counter(_forms(seeing, form_of).values())
    return tuple(_held_by(holder, spec, shape, layers, ends, tower, is_table_in_file) for holder in HOLDERS)


_Part = tuple[tuple[int, ...], MatrixForm, int]


def _held_by(
    holder: str,
    spec: ModelSpec,
    shape: StepShape,
    layers: Sequence[Mapping[_Part, int]],
    ends: Mapping[str, _Part],
    tower: Mapping[_Part, int],
    is_table_in_file: bool,
) -> HeldSizes:
    layer_bytes = tuple(
        sum(count * _part_bytes(holder, part) for part, count in layer.items()) for layer in layers
    )
    head_bytes = _part_bytes(holder, ends["head"]) + _part_bytes(holder, ends["norm"])
    scratch = scratch_bytes(holder, shape, max(layer_bytes))
    return HeldSizes(
        holder,
        layer_bytes=layer_bytes,
        embedding_bytes=_table_bytes(holder, ends["embedding"], is_table_in_file)
        + _tower_bytes(holder, spec, tower),
        head_bytes=head_bytes,
        kv_bytes=tuple((kv, held_kv_bytes(holder, kv, spec.kv_shape)) for kv in KV_TYPES),
        scratch_bytes=scratch,
        head_scratch_bytes=head_scratch_bytes(holder, shape, head_bytes, scratch),
        table_bytes=_table_bytes(holder, ends["embedding"], False),
    )


def _tower_bytes(holder: str, spec: ModelSpec, tower: Mapping[_Part, int]) -> int:
    """What a tower takes, with what it needs while it encodes the largest picture."""
    vision = spec.vision
    if vision is None or holder not in SEEING_HOLDERS:
        return 0
    most = vision.positions or -(-vision.size.most_pixels // vision.patch**2)
    weights = sum(count * _part_bytes(holder, part) for part, count in tower.items())
    return weights + tower_scratch_bytes(holder, most, vision.hidden, vision.intermediate, vision.heads)


def _held_by_fallback(holder: str, spec: ModelSpec, shape: StepShape, layout: Layout) -> HeldSizes:
    """`transformers` computes on the device of any holder: plain numbers, and recurrent states beside the layers."""
    element = fallback_element_bytes(holder)

    def held(places: Iterable[TensorPlace]) -> int:
        return element * sum(math.prod(place.shape) for place in places)

    states = STATE_SESSIONS * spec.state_bytes
    layer_bytes = tuple(held(layer.values()) + states for layer in layout.layers)
    named = layout.model.items()
    shared = held(place for name, place in named if name.startswith(SHARED))
    embedding = held(place for name, place in named if name == "embedding" or name.startswith(EMBEDDING))
    head_bytes = held((layout.model["head"],))
    scratch = shared + fallback_scratch_bytes(holder, shape, max(layer_bytes) - states)
    return HeldSizes(
        holder,
        layer_bytes=layer_bytes,
        embedding_bytes=embedding,
        head_bytes=head_bytes,
        kv_bytes=tuple((kv, 2 * element * spec.kv_heads * spec.head_dim) for kv in KV_TYPES),
        scratch_bytes=scratch,
        head_scratch_bytes=head_scratch_bytes("torch/cpu", shape, head_bytes, scratch),
    )


def _forms(places: Mapping[str, TensorPlace], form_of: FormOf) -> dict[str, _Part]:
    return {
        name: (place.shape, *(form_of(name, place) if len(place.shape) > 1 else (FLOAT32, 0)))
        for name, place in places.items()
    }


def _part_bytes(holder: str, part: _Part) -> int:
    shape, form, file_bytes = part
    if len(shape) == 1:
        return 4 * shape[0]
    return matrix_bytes(holder, form, shape[0], shape[1], file_bytes)


def _table_bytes(holder: str, part: _Part, stays_in_file: bool) -> int:
    shape, form, file_bytes = part
    return table_bytes(holder, form, shape[0], shape[1], file_bytes, stays_in_file=stays_in_file)
