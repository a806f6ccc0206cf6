"""Share ranges: which bytes of stored tensors a stage reads, or a tensor rank's share of it. Pure.

Rows of a matrix lie together in its file, so that a rank reads its own and no more; columns do so only where a matrix
is stored transposed. Of stacked experts it reads those that it owns. Read whole is what is small (vectors), what lies
in several tensors that are unpacked together (`weights.quantised`), and what is rounded to `mixed` where it arrives, by
columns that all rows choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardcompute.models.layout import TensorPlace
from shardcompute.models.spec import Stage
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.models.tensor_share import TensorCut, cut_of, tensor_cuts
from shardcompute.weights.card import Card, row_range
from shardcompute.weights.formats.tensor_file import Span
from shardcompute.weights.loader import early_cut, stored_rows

Ranges = Mapping[str, tuple[Span, ...]]
"""By stored tensor, in order and apart from each other."""


def stage_ranges(card: Card, stage: Stage, rank: TensorRank | None = None) -> Ranges:
    """What is read for a stage, adapters included; with `rank`, for its share of it."""
    adapters = {name: _whole(card, name) for name in card.stage_adapters(stage)}
    if rank is None:
        return {name: _whole(card, name) for name in card.stage_tensors(stage)} | adapters
    cuts, owned = tensor_cuts(card.spec, rank.share, rank.split.exchange), rank.owned_experts
    folded = card.folded_entries if card.quantization else None
    found: dict[str, list[Span]] = {}
    for name, place in card.layout.stage_tensors(stage):
        if owned is not None and name.startswith("experts.") and not _is_owned(name, owned):
            continue
        for stored in card.stored_names(place):
            is_alone = folded is None or folded[place.stored] == card.entries.get(place.stored)
            span = _read_of(card, name, place, stored, cut_of(cuts, name)) if is_alone else None
            found.setdefault(stored, []).append(span or _whole(card, stored)[0])
    return {stored: _joined(spans) for stored, spans in found.items()} | adapters


def ranges_bytes(ranges: Ranges) -> int:
    return sum(stop - start for spans in ranges.values() for start, stop in spans)


def _read_of(card: Card, name: str, place: TensorPlace, stored: str, cut: TensorCut) -> Span | None:
    """The bytes of a stored tensor from which a rank's part of one of ours is read; None: all of them."""
    entry = card.entries[stored]
    if len(place.shape) < 2:
        return None
    if stored != place.stored:
        # A part of a packed matrix; which of its columns are kept apart is the same for all rows.
        is_by_row = cut.rows is not None and not stored.endswith("#columns")
        offset, length = row_range(entry, *cut.rows) if is_by_row and cut.rows else (0, entry.size_bytes)
        return offset, offset + length
    form = "native" if card.kind == "packed" else card.form
    rows = stored_rows(place, entry, *early_cut(name, place, cut, form))
    return None if rows is None else (rows[0] * entry.row_bytes, rows[1] * entry.row_bytes)


def _is_owned(name: str, owned: Span) -> bool:
    return owned[0] <= int(name.split(".")[1]) < owned[1]


def _whole(card: Card, stored: str) -> tuple[Span, ...]:
    return ((0, card.entries[stored].size_bytes),)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)
