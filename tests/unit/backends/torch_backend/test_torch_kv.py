"""The paged pool: who owns which page, and that what is written is what is read."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import CapacityError, PromptTooLongError, UsageError
from shardcompute.core.kv_types import KvShape

torch = pytest.importorskip("torch")
from shardcompute.backends.torch.kv import PagedKv  # noqa: E402
from shardcompute.backends.torch.plan import cut_blocks, plan_step  # noqa: E402

PAGE_BYTES = 2 * 2 * 3 * PAGE_TOKENS * 4 * 4


def make(pages: int = 5, context: int = 1000) -> PagedKv:
    return PagedKv(
        2,
        KvShape(3, 4),
        context_length=context,
        budget_bytes=pages * PAGE_BYTES + 17,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_one_page_of_the_budget_is_scratch() -> None:
    kv = make(pages=5)
    assert kv.budget.usage().total_bytes == 4 * PAGE_BYTES
    assert kv.pool.nbytes == 5 * PAGE_BYTES
    kv.take([Segment(1, 0, 4 * PAGE_TOKENS)])
    assert kv.scratch not in kv.table(1)
    with pytest.raises(CapacityError):
        kv.take([Segment(2, 0, 1)])


def test_a_budget_of_one_page_is_refused() -> None:
    with pytest.raises(CapacityError):
        make(pages=1)


def test_truncation_frees_pages_for_others() -> None:
    kv = make()
    kv.take([Segment(1, 0, 3 * PAGE_TOKENS), Segment(2, 0, 1)])
    kv.take([Segment(1, 10, 1)])
    assert len(kv.table(1)) == 1
    kv.take([Segment(2, 1, 2 * PAGE_TOKENS)])
    assert not set(kv.table(1)) & set(kv.table(2))
    kv.release(1)
    kv.release(1)
    kv.take([Segment(3, 0, PAGE_TOKENS)])
    assert not set(kv.table(2)) & set(kv.table(3))


def test_a_refused_batch_changes_nothing() -> None:
    kv = make()
    kv.take([Segment(1, 0, 70)])
    table = list(kv.table(1))
    for batch, error in (
        ([Segment(1, 3, 1), Segment(2, 0, 4 * PAGE_TOKENS)], CapacityError),
        ([Segment(1, 3, 1), Segment(2, 1, 1)], UsageError),
        ([Segment(1, 3, 1), Segment(2, 0, 1001)], PromptTooLongError),
    ):
        with pytest.raises(error):
            kv.take(batch)
        assert list(kv.table(1)) == table
        assert kv.budget.lengths == {1: 70}


def test_what_is_written_is_read_back() -> None:
    kv = make()
    kv.take([Segment(2, 0, 3)])
    segments = [Segment(2, 3, 2), Segment(1, 0, PAGE_TOKENS + 5)]
    kv.take(segments)
    plan = plan_step(segments, kv)
    pages = plan.tables[plan.owners, plan.positions // PAGE_TOKENS]
    places = torch.from_numpy(pages.astype(np.int64) * PAGE_TOKENS + plan.positions % PAGE_TOKENS)
    keys, values = torch.randn(plan.rows, 3, 4), torch.randn(plan.rows, 3, 4)
    kv.write(1, places, keys, values)
    first, second = kv.read(1, torch.tensor(kv.table(1)), PAGE_TOKENS + 5)
    assert torch.equal(first, keys[2:].transpose(0, 1))
    assert torch.equal(second, values[2:].transpose(0, 1))
    assert torch.equal(kv.read(1, torch.tensor(kv.table(2)), 5)[0][:, 3:], keys[:2].transpose(0, 1))
    assert not kv.pool[0].any()


def test_a_plan_says_where_rows_lie() -> None:
    kv = make(context=130)
    segments = [Segment(9, 0, 2, 2), Segment(7, 0, 66, 1)]
    kv.take(segments)
    plan = plan_step(segments, kv)
    assert plan.rows == 68
    assert plan.positions.tolist() == [0, 1, *range(66)]
    assert plan.owners.tolist() == [0] * 2 + [1] * 66
    assert plan.logit_rows.tolist() == [0, 1, 67]
    assert plan.tables.tolist() == [[*kv.table(9), kv.scratch, kv.scratch], [*kv.table(7), kv.scratch]]
    assert (plan.short_rows, plan.order) == (2, None)
    assert cut_blocks(plan).tolist() == [[2, 64], [66, 2]]


def test_short_segments_come_first() -> None:
    kv = make(context=200)
    segments = [Segment(1, 0, 65, 1), Segment(2, 0, 3, 2), Segment(4, 0, 64, 1)]
    kv.take(segments)
    plan = plan_step(segments, kv)
    assert [segment.session for segment in plan.segments] == [2, 4, 1]
    assert plan.order is not None
    assert plan.order.tolist() == [*range(65, 132), *range(65)]
    assert plan.short_rows == 67
    # Rows of logits stay in the batch's order: that of session 1, two of 2, one of 4.
    assert plan.logit_rows.tolist() == [131, 1, 2, 66]
    assert plan.positions.tolist() == [*range(3), *range(64), *range(65)]
    assert cut_blocks(plan).tolist() == [[67, 64], [131, 1]]


def test_blocks_of_a_long_segment_lie_in_one_page_each() -> None:
    kv = make(context=200)
    segments = [Segment(1, 0, 60, 0)]
    kv.take(segments)
    segments = [Segment(2, 0, 2, 1), Segment(1, 60, 70, 1)]
    kv.take(segments)
    assert cut_blocks(plan_step(segments, kv)).tolist() == [[2, 4], [6, 64], [70, 2]]
