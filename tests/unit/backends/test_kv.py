"""KV in host memory: pages are counted exactly, refusals change nothing, sessions do not touch each other."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from shardcompute.backends.executor import KvUsage
from shardcompute.backends.kv import HostKv, KvRows, PageBudget, count_pages
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import CapacityError, PromptTooLongError, UsageError
from shardcompute.core.kv_types import KvShape, KvType, kv_token_bytes

LAYERS, HEADS, DIM = 2, 3, 8
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 4
PAGE_BYTES = TOKEN_BYTES * PAGE_TOKENS


def make_kv(pages: int, context_length: int = 1000) -> HostKv:
    return HostKv(LAYERS, KvShape(HEADS, DIM), context_length=context_length, budget_bytes=pages * PAGE_BYTES)


def rows(count: int, value: float) -> KvRows:
    return KvRows(np.full((count, HEADS, DIM), value, dtype=np.float32))


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_tokens_take_whole_pages(tokens: int, pages: int) -> None:
    assert count_pages(tokens) == pages


def test_growing_truncating_and_releasing_are_counted() -> None:
    budget = PageBudget(page_bytes=10, total_pages=5, context_length=1000)
    for segment, used in [
        (Segment(1, 0, 64), 1),
        (Segment(1, 64, 1), 2),
        (Segment(2, 0, 129), 5),
        (Segment(2, 10, 20), 3),
        (Segment(1, 0, 1), 2),
    ]:
        budget.check([segment])
        budget.take(segment)
        assert budget.used_pages == used
    assert budget.lengths == {1: 1, 2: 30}
    assert budget.usage() == KvUsage(used_bytes=20, total_bytes=50, free_tokens=3 * PAGE_TOKENS, sessions=2)
    budget.release(1)
    budget.release(1)
    budget.release(99)
    assert budget.usage() == KvUsage(used_bytes=10, total_bytes=50, free_tokens=4 * PAGE_TOKENS, sessions=1)


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        ([Segment(1, 11, 1)], UsageError, "leave a gap"),
        ([Segment(1, -1, 1)], UsageError, "leave a gap"),
        ([Segment(2, 1, 1)], UsageError, "leave a gap"),
        ([Segment(1, 10, 0)], UsageError, "cannot want"),
        ([Segment(1, 10, 2, 3)], UsageError, "cannot want"),
        ([Segment(1, 10, 2, -1)], UsageError, "cannot want"),
        ([Segment(2, 0, 1), Segment(2, 1, 1)], UsageError, "two segments"),
        ([Segment(1, 10, 191)], PromptTooLongError, "position 201 is past the context of 200"),
        ([Segment(2, 0, 65), Segment(3, 0, 65)], CapacityError, "5 more pages .* 2 of 3 are free"),
        ([Segment(1, 10, 55), Segment(2, 0, 65)], CapacityError, "4 more pages"),
    ],
)
def test_a_refused_batch_changes_nothing(
    segments: list[Segment], error: type[Exception], message: str
) -> None:
    kv = make_kv(3, context_length=200)
    first = Segment(1, 0, 10)
    kv.take([first])
    kv.write(first, 0, rows(10, 1.0), rows(10, 2.0))
    before = kv.budget.usage()
    with pytest.raises(error, match=message):
        kv.take([Segment(9, 0, 1), *segments])
    assert kv.budget.usage() == before
    assert kv.budget.lengths == {1: 10}
    assert (kv[1][0, 0, :10] == 1.0).all()
    with pytest.raises(KeyError):
        kv[9]


def test_pages_that_a_batch_gives_back_are_not_counted_on_before_it_is_done() -> None:
    """A session that shrinks and one that grows: either order fits or is refused the same way."""
    kv = make_kv(3)
    kv.take([Segment(1, 0, 128)])
    shrinks, grows = Segment(1, 0, 1), Segment(2, 0, 128)
    for batch in ([shrinks, grows], [grows, shrinks]):
        with pytest.raises(CapacityError):
            kv.take(batch)
    kv.take([shrinks])
    kv.take([grows])
    assert kv.budget.usage().free_tokens == 0


def test_sessions_and_layers_do_not_touch_each_other() -> None:
    kv = make_kv(10)
    one, two = Segment(1, 0, 70), Segment(2, 0, 3)
    kv.take([one, two])
    for layer in range(LAYERS):
        kv.write(one, layer, rows(70, layer + 1), rows(70, -layer - 1))
        kv.write(two, layer, rows(3, 10 * layer + 10), rows(3, -10 * layer - 10))
    later = Segment(1, 65, 2)
    kv.take([later])
    kv.write(later, 1, rows(2, 100), rows(2, -100))
    assert kv[1].shape[1:] == (2, count_pages(1000) * PAGE_TOKENS, HEADS, DIM)
    assert (kv[1][0, 0, :70] == 1).all()
    assert (kv[1][1, 0, :65] == 2).all()
    assert (kv[1][1, 1, 65:67] == -100).all()
    assert (kv[2][1, 0, :3] == 20).all()
    assert kv.budget.lengths == {1: 67, 2: 3}


def test_a_released_session_starts_again_from_nothing() -> None:
    kv = make_kv(2)
    kv.take([Segment(1, 0, 128)])
    kv.release(1)
    assert kv.budget.usage().free_tokens == 2 * PAGE_TOKENS
    with pytest.raises(UsageError, match="gap"):
        kv.take([Segment(1, 128, 1)])
    kv.take([Segment(1, 0, 128)])


def test_memory_is_taken_as_it_is_written_and_given_back() -> None:
    """A long context costs address space, not memory."""
    kv = HostKv(8, KvShape(8, 64), context_length=1 << 20, budget_bytes=1 << 40)
    process = psutil.Process()
    before = process.memory_info()
    kv.take([Segment(1, 0, 1000)])
    kv[1][:, :, :1000] = 1
    used = process.memory_info()
    reserved = 8 * 2 * (1 << 20) * 8 * 64 * 4
    assert used.vms - before.vms >= reserved
    assert used.rss - before.rss < reserved // 100
    kv.release(1)
    assert process.memory_info().vms - before.vms < reserved // 2


def test_a_context_that_no_address_space_holds_is_refused_whole() -> None:
    kv = HostKv(64, KvShape(64, 256), context_length=1 << 28, budget_bytes=1 << 60)
    with pytest.raises(CapacityError, match="address space"):
        kv.take([Segment(1, 0, 1)])
    assert kv.budget.usage().sessions == 0
    with pytest.raises(KeyError):
        kv[1]


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(CapacityError, match="do not hold one page"):
        HostKv(LAYERS, KvShape(HEADS, DIM), context_length=100, budget_bytes=PAGE_BYTES - 1)
    assert make_kv(1).budget.total_pages == 1


def noise(count: int) -> Float32:
    return np.random.default_rng(count).standard_normal((count, HEADS, DIM), dtype=np.float32)


@pytest.mark.parametrize(("kv_type", "error"), [("float32", 0.0), ("float16", 2e-3), ("int8", 2e-2)])
def test_rows_are_rounded_once_and_read_as_they_were_rounded(kv_type: KvType, error: float) -> None:
    kv = HostKv(LAYERS, KvShape(HEADS, DIM), context_length=100, budget_bytes=1 << 20, kv_type=kv_type)
    segments = [Segment(1, 0, 5), Segment(2, 0, 3)]
    kv.take(segments)
    keys, values = noise(8), -noise(8) * 3
    rounded = kv.round(keys), kv.round(values)
    kv.write(segments[0], 1, *rounded)
    kv.write(segments[1], 1, *rounded, row=5)
    np.testing.assert_allclose(kv.read(2, 1, 3), np.stack([keys[5:], values[5:]]), atol=4 * error)
    alone = kv.round(keys[6:7])
    kv.write(Segment(2, 1, 1), 1, alone, kv.round(values[6:7]))
    together = kv.read(2, 1, 3)
    kv.write(segments[1], 1, *rounded, row=5)
    assert np.array_equal(kv.read(2, 1, 3), together), (
        "a row is rounded to the same bits whatever its neighbours"
    )
    kv.adopt(2, 3, 2, is_moved=False)
    kv.adopt(2, 4, 3, is_moved=True)
    assert np.array_equal(kv.read(3, 1, 2), together[:, :2])
    assert np.array_equal(kv.read(4, 1, 3), together)
    assert kv.budget.page_bytes == LAYERS * kv_token_bytes(kv_type, KvShape(HEADS, DIM)) * PAGE_TOKENS


def test_what_a_token_costs_follows_from_the_type() -> None:
    sizes = [kv_token_bytes(kv_type, KvShape(HEADS, DIM)) for kv_type in ("float32", "float16", "int8")]
    assert sizes == [2 * HEADS * DIM * 4, 2 * HEADS * DIM * 2, 2 * HEADS * (DIM + 4)]


@pytest.mark.parametrize("kv_type", ["float16", "int8"])
def test_numbers_at_the_edges_stay_numbers(kv_type: KvType) -> None:
    kv = HostKv(LAYERS, KvShape(HEADS, DIM), context_length=100, budget_bytes=1 << 20, kv_type=kv_type)
    segment = Segment(1, 0, 3)
    kv.take([segment])
    edges = np.zeros((3, HEADS, DIM), dtype=np.float32)
    edges[0, 0, 0], edges[1, :, :] = 1e6, 1e-38
    kv.write(segment, 0, kv.round(edges), kv.round(-edges))
    read = kv.read(1, 0, 3)
    assert np.isfinite(read).all()
    assert read[0, 0, 0, 0] >= 65504
    assert (read[:, 2] == 0).all()
