"""Blocks of rows that attend together: within a page, and all or none of them seeing further than themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shardcompute.core.batch import Segment

torch = pytest.importorskip("torch")
from shardcompute.backends.torch.plan import StepPlan, cut_blocks  # noqa: E402


def _plan(segments: tuple[Segment, ...]) -> StepPlan:
    positions = np.concatenate([np.arange(each.start, each.stop, dtype=np.int32) for each in segments])
    nothing = np.zeros(len(positions), np.int32)
    return StepPlan(segments, positions, nothing, nothing[None], nothing[:1], 0)


def test_blocks_end_with_pages() -> None:
    plan = _plan((Segment(1, 0, 5), Segment(2, 60, 70), Segment(3, 128, 65)))
    assert cut_blocks(plan).tolist() == [[5, 4], [9, 64], [73, 2], [75, 64], [139, 1]]


def test_blocks_end_where_a_picture_does() -> None:
    plan = _plan((Segment(1, 0, 3), Segment(2, 10, 80)))
    ends = plan.positions + 1
    ends[3 + 20 : 3 + 60] = 70
    blocks = cut_blocks(dataclasses.replace(plan, ends=ends)).tolist()
    # The last row of the picture sees no further than itself.
    assert blocks == [[3, 20], [23, 34], [57, 5], [62, 21]]
    assert cut_blocks(plan).tolist() == [[3, 54], [57, 26]]
