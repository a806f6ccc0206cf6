"""Step plan, where the rows of one step lie: positions, pages and logit rows of a ragged batch, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.torch.kv import PagedKv
from shardcompute.core.batch import PAGE_TOKENS, Segment, count_rows, logit_row_indices

Int32 = NDArray[np.int32]

SHORT_SEGMENT = 64
"""In segments of up to so many rows (decoding, and verifying drafts), every row is attended from by itself."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Per row its position and owner (index of its segment); per segment its page table; and the logit rows.

    Short segments come first, `short_rows` rows in all; `order` says which row of the batch each row is, or is None
    where they are in the batch's own order. `turns [3, rows]` are positions by which rows turn (see `SessionPictures`),
    None: by their own; `ends` where what each row sees ends, None: behind itself.
    """

    segments: tuple[Segment, ...]
    positions: Int32
    owners: Int32
    tables: Int32
    logit_rows: Int32
    short_rows: int
    order: Int32 | None = None
    turns: Int32 | None = None
    ends: Int32 | None = None

    @property
    def rows(self) -> int:
        return len(self.positions)

    @property
    def has_adapters(self) -> bool:
        return any(segment.adapter for segment in self.segments)

    def later(self, steps: int) -> StepPlan:
        """The same rows so many positions on, for which there is room already."""
        segments = tuple(replace(segment, start=segment.start + steps) for segment in self.segments)
        return replace(self, segments=segments, positions=self.positions + np.int32(steps))


def plan_step(segments: Sequence[Segment], kv: PagedKv) -> StepPlan:
    """Only after the KV has taken the batch. Unused entries of the tables name the scratch page."""
    rows = count_rows(segments)
    logit_rows = np.asarray(logit_row_indices(segments), dtype=np.int32)
    order = _order_rows(segments)
    if order is not None:
        places = np.empty(rows, dtype=np.int32)
        places[order] = np.arange(rows, dtype=np.int32)
        logit_rows = places[logit_rows]
        segments = sorted(segments, key=_is_long)
    counts = np.asarray([segment.count for segment in segments])
    starts = np.asarray([segment.start for segment in segments])
    owners = np.repeat(np.arange(len(segments), dtype=np.int32), counts)
    # Within its segment, each row is one further than the row before it.
    first_rows = np.cumsum(counts) - counts
    positions = (np.arange(rows) + (starts - first_rows)[owners]).astype(np.int32)
    tables = kv.table_rows([segment.session for segment in segments])
    short_rows = int(counts[counts <= SHORT_SEGMENT].sum())
    return StepPlan(tuple(segments), positions, owners, tables, logit_rows, short_rows, order)


def cut_blocks(plan: StepPlan) -> Int32:
    """The rows of long segments in blocks, `[blocks, 2]`: (first row, rows). A block's rows lie in one page, and all or
    none of them see further than themselves."""
    blocks: list[tuple[int, int]] = []
    row = 0
    for segment in plan.segments:
        if _is_long(segment):
            edges = {segment.start, segment.stop}
            edges.update(
                page * PAGE_TOKENS
                for page in range(segment.start // PAGE_TOKENS + 1, -(-segment.stop // PAGE_TOKENS))
            )
            if plan.ends is not None:
                own = slice(row, row + segment.count)
                is_far = plan.ends[own] > plan.positions[own] + 1
                edges.update((segment.start + 1 + np.flatnonzero(is_far[1:] != is_far[:-1])).tolist())
            ordered = sorted(edges)
            blocks += [(row + start - segment.start, stop - start) for start, stop in pairwise(ordered)]
        row += segment.count
    return np.asarray(blocks, dtype=np.int32).reshape(-1, 2)


def _is_long(segment: Segment) -> bool:
    return segment.count > SHORT_SEGMENT


def _order_rows(segments: Sequence[Segment]) -> Int32 | None:
    """Rows of short segments before those of long ones, else as they are; None where they are so already."""
    longs = [_is_long(segment) for segment in segments]
    if longs == sorted(longs):
        return None
    starts = np.cumsum([0, *(segment.count for segment in segments)])
    parts = sorted(zip(longs, starts, segments, strict=False), key=lambda part: part[0])
    return np.concatenate(
        [np.arange(start, start + segment.count, dtype=np.int32) for _, start, segment in parts]
    )
