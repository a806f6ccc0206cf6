"""Step plan, where the rows of one step lie: positions, pages and logit rows of a ragged batch, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.torch.kv import PagedKv
from shardcompute.core.batch import Segment, count_rows, logit_row_indices

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Per row its position and owner (index of its segment); per segment its page table; and the logit rows."""

    segments: tuple[Segment, ...]
    positions: Int32
    owners: Int32
    tables: Int32
    logit_rows: Int32

    @property
    def rows(self) -> int:
        return len(self.positions)


def plan_step(segments: Sequence[Segment], kv: PagedKv) -> StepPlan:
    """Only after the KV has taken the batch. Unused entries of the tables name the scratch page."""
    rows = count_rows(segments)
    positions = np.empty(rows, dtype=np.int32)
    owners = np.empty(rows, dtype=np.int32)
    tables = np.full((len(segments), kv.table_width), kv.scratch, dtype=np.int32)
    row = 0
    for index, segment in enumerate(segments):
        positions[row : row + segment.count] = np.arange(segment.start, segment.stop)
        owners[row : row + segment.count] = index
        table = kv.table(segment.session)
        tables[index, : len(table)] = table
        row += segment.count
    logit_rows = np.asarray(logit_row_indices(segments), dtype=np.int32)
    return StepPlan(tuple(segments), positions, owners, tables, logit_rows)
