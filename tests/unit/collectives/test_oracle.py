"""Collectives against numpy: every algorithm, type and number of ranks, odd and ragged sizes, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardcompute.collectives import Algorithm, Array, FabricGroup, TopologyChoice, run_ranks, thread_groups
from shardcompute.collectives.elements import CODES, from_bfloat16, to_bfloat16
from shardcompute.collectives.topology import Grid

SIZES = (0, 1, 2, 3, 5, 7, 8, 13, 64, 257, 1003)
RANKS = range(2, 9)
WAYS = [None, *Algorithm]

FLOAT = np.dtype("float32")


def example(rank: int, size: int, dtype: np.dtype[np.generic]) -> Array:
    """Numbers of very different size, so that every order of sums has bits of its own."""
    rng = np.random.default_rng([rank, size, CODES[dtype]])
    numbers = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)
    if dtype == np.uint16:
        return to_bfloat16(numbers.astype(np.float32))
    if dtype.kind in "iu":
        return rng.integers(0, 255, size).astype(dtype)
    return numbers.astype(dtype)


def plus(a: Array, b: Array) -> Array:
    if a.dtype == np.uint16:
        return to_bfloat16(from_bfloat16(a) + from_bfloat16(b))
    return a + b


def tree_sum(arrays: Sequence[Array]) -> Array:
    """The documented order, written down once more: the left half is the largest power of two that leaves a rest."""
    if len(arrays) == 1:
        return arrays[0]
    half = 1 << ((len(arrays) - 1).bit_length() - 1)
    return plus(tree_sum(arrays[:half]), tree_sum(arrays[half:]))


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_the_trees_sum_whatever_the_algorithm(ranks: int, way: Algorithm | None) -> None:
    cases = [(dtype, size) for dtype in CODES for size in SIZES]

    def work(group: FabricGroup) -> list[Array]:
        return [group.all_reduce(example(group.rank, size, dtype)) for dtype, size in cases]

    outcomes = run_ranks(thread_groups(ranks, TopologyChoice(way)), work)

    for index, (dtype, size) in enumerate(cases):
        expected = tree_sum([example(rank, size, dtype) for rank in range(ranks)])
        for rank, found in enumerate(outcomes):
            assert same_bits(found[index], expected), (rank, dtype, size)


@pytest.mark.parametrize(
    "grid", [Grid(2, 3), Grid(3, 2), Grid(1, 6), Grid(6, 1), Grid(2, 4), Grid(4, 2), Grid(1, 7)]
)
def test_a_mesh_adds_in_the_same_order_whatever_its_rows(grid: Grid) -> None:
    ranks = grid.rows * grid.columns
    dtype = np.dtype("float32")
    groups = thread_groups(ranks, TopologyChoice(Algorithm.MESH, grid))

    outcomes = run_ranks(
        groups, lambda group: [group.all_reduce(example(group.rank, size, dtype)) for size in SIZES]
    )

    for index, size in enumerate(SIZES):
        expected = tree_sum([example(rank, size, dtype) for rank in range(ranks)])
        assert all(same_bits(found[index], expected) for found in outcomes), size


@pytest.mark.parametrize("ranks", RANKS)
def test_a_row_has_the_same_bits_alone_and_among_others(ranks: int) -> None:
    rows = [np.stack([example(rank, 96, np.dtype("float32"))] * 40) for rank in range(ranks)]

    def work(group: FabricGroup) -> list[Array]:
        mine = rows[group.rank]
        return [group.all_reduce(mine[:1]), group.all_reduce(mine[:7]), group.all_reduce(mine)]

    for way in WAYS:
        alone, few, many = run_ranks(thread_groups(ranks, TopologyChoice(way)), work)[0]
        assert all(same_bits(row, alone[0]) for row in [*few, *many])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", RANKS)
def test_scattered_sums_are_cuts_of_the_whole(ranks: int, way: Algorithm | None) -> None:
    uneven = [(3 * rank) % 5 for rank in range(ranks)]
    even = np.float32(1) * np.arange(2 * ranks + 1).repeat(3).reshape(-1, 3)

    def work(group: FabricGroup) -> list[Array]:
        whole = [example(group.rank, sum(uneven) * 4, dtype).reshape(sum(uneven), 2, 2) for dtype in CODES]
        scattered = [group.reduce_scatter(each, uneven) for each in whole]
        return [*scattered, group.reduce_scatter(even)]

    outcomes = run_ranks(thread_groups(ranks, TopologyChoice(way)), work)

    for index, dtype in enumerate(CODES):
        sums = tree_sum([example(rank, sum(uneven) * 4, dtype) for rank in range(ranks)])
        rows = np.split(sums.reshape(sum(uneven), 2, 2), np.cumsum(uneven)[:-1])
        assert all(same_bits(found[index], row) for found, row in zip(outcomes, rows, strict=True))
    assert same_bits(np.concatenate([found[-1] for found in outcomes]), even * np.float32(ranks))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", RANKS)
def test_gathered_arrays_keep_their_ragged_shapes(ranks: int, way: Algorithm | None) -> None:
    def given(rank: int, dtype: np.dtype[np.generic]) -> Array:
        return example(rank, (rank % 3) * 2 * 3, dtype).reshape(rank % 3, 2, 3)

    def work(group: FabricGroup) -> list[list[Array]]:
        return [group.all_gather(given(group.rank, dtype)) for dtype in CODES]

    for found in run_ranks(thread_groups(ranks, TopologyChoice(way)), work):
        for dtype, gathered in zip(CODES, found, strict=True):
            expected = [given(rank, dtype) for rank in range(ranks)]
            assert all(same_bits(a, b) for a, b in zip(gathered, expected, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", RANKS)
def test_columns_of_all_ranks_lie_side_by_side(ranks: int, way: Algorithm | None) -> None:
    widths = [3 * rank % 5 for rank in range(ranks)]

    def given(rank: int, rows: int, dtype: np.dtype[np.generic]) -> Array:
        return example(rank, rows * widths[rank], dtype).reshape(rows, widths[rank])

    def work(group: FabricGroup) -> list[Array]:
        found = [group.gather_columns(given(group.rank, 1, dtype), widths) for dtype in CODES]
        found += [group.gather_columns(given(group.rank, rows, FLOAT), widths) for rows in (0, 3)]
        out = np.empty((2, sum(widths)), FLOAT)
        assert group.gather_columns(given(group.rank, 2, FLOAT), widths, out) is out
        return [*found, out]

    for found in run_ranks(thread_groups(ranks, TopologyChoice(way)), work):
        cases = [*((1, dtype) for dtype in CODES), (0, FLOAT), (3, FLOAT), (2, FLOAT)]
        for gathered, (rows, dtype) in zip(found, cases, strict=True):
            expected = np.concatenate([given(rank, rows, dtype) for rank in range(ranks)], axis=-1)
            assert same_bits(gathered, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_can_broadcast(ranks: int, way: Algorithm | None) -> None:
    def given(root: int) -> Array:
        return example(root, 15, list(CODES)[root % len(CODES)]).reshape(3, 5)

    def work(group: FabricGroup) -> list[Array]:
        return [group.broadcast(given(root) if root == group.rank else None, root) for root in range(ranks)]

    for found in run_ranks(thread_groups(ranks, TopologyChoice(way)), work):
        assert all(same_bits(array, given(root)) for root, array in enumerate(found))


def test_no_rank_passes_a_barrier_before_all_have_come() -> None:
    for ranks in RANKS:
        arrived: list[int] = []

        def work(group: FabricGroup, arrived: list[int] = arrived) -> int:
            arrived.append(group.rank)
            group.barrier()
            return len(arrived)

        assert run_ranks(thread_groups(ranks), work) == [ranks] * ranks


def test_arrays_go_from_rank_to_rank_in_order() -> None:
    def work(group: FabricGroup) -> list[Array]:
        if group.rank == 0:
            for size in SIZES:
                group.send(example(0, size, np.dtype("float16")), 2)
            return []
        return [group.receive(0) for _ in SIZES] if group.rank == 2 else []

    found = run_ranks(thread_groups(3), work)[2]
    assert all(
        same_bits(array, example(0, size, np.dtype("float16")))
        for array, size in zip(found, SIZES, strict=True)
    )


def test_sums_can_be_written_over_what_was_added() -> None:
    for way in WAYS:

        def work(group: FabricGroup) -> tuple[Array, Array]:
            mine = example(group.rank, 1003, np.dtype("float32"))
            given = mine.copy()
            apart = group.all_reduce(given)
            assert same_bits(given, mine)
            assert group.all_reduce(given, out=given) is given
            return apart, given

        for apart, within in run_ranks(thread_groups(5, TopologyChoice(way)), work):
            assert same_bits(apart, within)


def test_strided_views_are_added_as_they_read() -> None:
    whole = example(0, 60, np.dtype("float32")).reshape(6, 10)

    found = run_ranks(thread_groups(2), lambda group: group.all_reduce(whole.T[::2]))

    assert same_bits(found[1], np.ascontiguousarray(whole.T[::2]) * np.float32(2))
