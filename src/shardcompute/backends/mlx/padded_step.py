"""Padded step: the rows of a ragged batch in one of few shapes, so that steps of equal shape share a compiled one.

Rows, segments, pages and logit rows are rounded up. Padded rows write to the scratch page and are never read.
Segments of about equal length attend together, as one batch over their gathered pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.kv import count_pages
from shardcompute.core.batch import PAGE_TOKENS, Segment, count_rows, logit_row_indices

Indices = NDArray[np.int32]


class Tables(Protocol):
    def __getitem__(self, session: int) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Segments that attend together: their rows `[segments, count]` and pages `[segments, pages]`."""

    rows: Indices
    tables: Indices


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """`positions` and `places` (page · PAGE_TOKENS + slot) per row; `order` finds a row in what the groups give,
    one behind the other; `row_count` and `logit_count` are what is not padding."""

    positions: Indices
    places: Indices
    logit_rows: Indices
    groups: tuple[SegmentGroup, ...]
    order: Indices
    row_count: int
    logit_count: int
    turns: Indices | None = None
    """Positions `[3, rows]` by which rows turn, in models that see."""
    ends: Indices | None = None
    """And where what rows see ends."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Equal for steps that the same compiled functions can run."""
        sizes = (size for group in self.groups for size in (*group.rows.shape, group.tables.shape[1]))
        return (len(self.positions), len(self.logit_rows), *sizes)


def pad_step(segments: Sequence[Segment], tables: Tables, scratch: int) -> PaddedStep:
    """Only after the tables have taken the batch."""
    count = count_rows(segments)
    positions = np.zeros(round_up(count), dtype=np.int32)
    places = np.full(len(positions), scratch * PAGE_TOKENS, dtype=np.int32)
    order = np.zeros(len(positions), dtype=np.int32)
    groups, first, offset = [], _first_rows(segments), 0
    for width, members in _by_width(segments).items():
        rows = np.zeros((round_up(len(members)), width), dtype=np.int32)
        deepest = max(count_pages(segments[index].stop) for index in members)
        pages = np.full((len(rows), round_up(deepest)), scratch, dtype=np.int32)
        for at, index in enumerate(members):
            segment = segments[index]
            here = slice(first[index], first[index] + segment.count)
            table = np.asarray(tables[segment.session], dtype=np.int32)
            positions[here] = np.arange(segment.start, segment.stop)
            places[here] = table[positions[here] // PAGE_TOKENS] * PAGE_TOKENS + positions[here] % PAGE_TOKENS
            order[here] = offset + at * width + np.arange(segment.count)
            rows[at, : segment.count] = np.arange(here.start, here.stop)
            pages[at, : len(table)] = table
        groups.append(SegmentGroup(rows, pages))
        offset += rows.size
    wanted = logit_row_indices(segments)
    logit_rows = np.zeros(round_up(max(len(wanted), 1)), dtype=np.int32)
    logit_rows[: len(wanted)] = wanted
    return PaddedStep(positions, places, logit_rows, tuple(groups), order, count, len(wanted))


def round_up(count: int) -> int:
    """The next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, …: at most a quarter more."""
    if count <= 8:
        return count
    step = 1 << ((count - 1).bit_length() - 3)
    return -(-count // step) * step


def _first_rows(segments: Sequence[Segment]) -> list[int]:
    return [0, *np.cumsum([segment.count for segment in segments]).tolist()]


def _by_width(segments: Sequence[Segment]) -> Mapping[int, list[int]]:
    """Indices of segments by their rounded length, single rows first."""
    groups: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        groups.setdefault(round_up(segment.count), []).append(index)
    return dict(sorted(groups.items()))
