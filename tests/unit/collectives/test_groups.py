"""Process groups: subsets of a world, what they count, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.collectives import (
    Algorithm,
    FabricGroup,
    TopologyChoice,
    parse_topology,
    run_ranks,
    thread_groups,
)
from shardcompute.collectives.topology import Grid, nearest_grid
from shardcompute.core.errors import UsageError

FLOAT = np.dtype("float32")


def bytes_sent(ranks: int, way: Algorithm, count: int) -> list[int]:
    def work(group: FabricGroup) -> int:
        group.all_reduce(np.ones(count, FLOAT))
        return group.stats.bytes_sent

    return run_ranks(thread_groups(ranks, TopologyChoice(way)), work)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_a_ring_sends_two_parts_less_than_twice_the_array(ranks: int) -> None:
    size = ranks * 60 * FLOAT.itemsize
    assert bytes_sent(ranks, Algorithm.RING, ranks * 60) == [2 * (ranks - 1) * size // ranks] * ranks


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_algorithm_changes_what_is_really_sent(ranks: int) -> None:
    count = 840
    size = count * FLOAT.itemsize
    assert bytes_sent(ranks, Algorithm.DIRECT, count) == [(ranks - 1) * size] * ranks
    assert sum(bytes_sent(ranks, Algorithm.TREE, count)) == 2 * (ranks - 1) * size
    if ranks in (2, 4, 8):
        assert bytes_sent(ranks, Algorithm.DOUBLING, count) == [(ranks.bit_length() - 1) * size] * ranks
        assert bytes_sent(ranks, Algorithm.MESH, count) == [2 * (ranks - 1) * size // ranks] * ranks


def test_rows_and_columns_of_a_world_add_by_themselves() -> None:
    def work(group: FabricGroup) -> tuple[float, float, float]:
        row, column = divmod(group.rank, 3)
        along = group.split([row * 3, row * 3 + 1, row * 3 + 2])
        down = group.split([column, column + 3])
        mine = np.full(4, 10.0**group.rank, np.float64)
        sums = along.all_reduce(mine), down.all_reduce(mine), group.all_reduce(mine)
        return float(sums[0][0]), float(sums[1][0]), float(sums[2][0])

    found = run_ranks(thread_groups(6), work)

    assert [each[0] for each in found] == [111.0] * 3 + [111000.0] * 3
    assert [each[1] for each in found] == [1001.0, 10010.0, 100100.0] * 2
    assert [each[2] for each in found] == [111111.0] * 6


def test_a_subset_has_its_own_order_and_counts() -> None:
    def work(group: FabricGroup) -> tuple[int, list[float], int, int] | None:
        if group.rank == 1:
            return None
        some = group.split([3, 0, 2])
        gathered = some.all_gather(np.array([group.rank], FLOAT))
        return some.rank, [float(each[0]) for each in gathered], some.stats.bytes_sent, group.stats.bytes_sent

    found = run_ranks(thread_groups(4), work)

    assert found == [(1, [3.0, 0.0, 2.0], 8, 0), None, (2, [3.0, 0.0, 2.0], 8, 0), (0, [3.0, 0.0, 2.0], 8, 0)]


def test_calls_are_counted_by_operation() -> None:
    def work(group: FabricGroup) -> dict[str, int]:
        group.all_reduce(np.ones(3, FLOAT))
        group.all_reduce(np.ones(3, FLOAT))
        group.barrier()
        return dict(group.stats.calls)

    assert run_ranks(thread_groups(2), work) == [{"all_reduce": 2, "barrier": 1}] * 2


def test_a_group_of_one_needs_nobody() -> None:
    (group,) = thread_groups(1)
    array = np.arange(5, dtype=FLOAT)
    assert group.all_reduce(array).tolist() == array.tolist()
    assert group.reduce_scatter(array).tolist() == array.tolist()
    assert group.all_gather(array)[0].tolist() == array.tolist()
    assert group.gather_columns(array, [5]).tolist() == array.tolist()
    assert group.broadcast(array).tolist() == array.tolist()
    group.barrier()
    assert group.stats.frames_sent == 0


def test_columns_are_sent_once_to_each_other_rank() -> None:
    def work(group: FabricGroup) -> tuple[int, dict[str, int]]:
        group.gather_columns(np.ones((2, 3 + group.rank), FLOAT), [3, 4, 5])
        return group.stats.bytes_sent, dict(group.stats.calls)

    found = run_ranks(thread_groups(3), work)
    assert found == [(2 * 2 * width * FLOAT.itemsize, {"all_gather": 1}) for width in (3, 4, 5)]


def test_columns_of_another_width_are_refused_before_anything_is_sent() -> None:
    group = thread_groups(2)[0]
    with pytest.raises(UsageError, match=r"shape \[1, 3\] where widths are \[4, 2\]"):
        group.gather_columns(np.zeros((1, 3), FLOAT), [4, 2])
    with pytest.raises(UsageError, match="cannot be written"):
        group.gather_columns(np.zeros((1, 4), FLOAT), [4, 2], np.empty((1, 5), FLOAT))


def test_what_cannot_be_done_is_refused_before_anything_is_sent() -> None:
    group = thread_groups(2)[0]
    with pytest.raises(UsageError, match="no arrays of complex64"):
        group.all_reduce(np.zeros(3, np.complex64))
    with pytest.raises(UsageError, match="no arrays of >f4"):
        group.all_reduce(np.zeros(3, ">f4"))
    with pytest.raises(UsageError, match="over the limit"):
        group.all_reduce(np.broadcast_to(np.float32(0), (1 << 27,)))
    with pytest.raises(UsageError, match="cannot be written"):
        group.all_reduce(np.zeros(3, FLOAT), out=np.zeros(4, FLOAT))
    with pytest.raises(UsageError, match="cannot be scattered"):
        group.reduce_scatter(np.zeros(3, FLOAT), [1, 1])
    with pytest.raises(UsageError, match="cannot reach rank 2"):
        group.send(np.zeros(3, FLOAT), 2)
    with pytest.raises(UsageError, match="nothing to send"):
        group.broadcast(None)
    with pytest.raises(UsageError, match="cannot be in a group"):
        group.split([1])
    assert group.stats.frames_sent == 0


def test_topologies_are_named() -> None:
    assert parse_topology("auto").algorithm is None
    assert parse_topology("ring").algorithm is Algorithm.RING
    assert parse_topology("mesh=2x3") == TopologyChoice(Algorithm.MESH, Grid(2, 3))
    for wrong in ("star", "ring=2x2", "mesh=0x2", "mesh=", "mesh=2x3x4"):
        with pytest.raises(UsageError, match="no topology"):
            parse_topology(wrong)
    with pytest.raises(UsageError, match="not for 4 ranks"):
        thread_groups(4, parse_topology("mesh=2x3"))
    assert nearest_grid(8) == Grid(2, 4)
    assert nearest_grid(6) == Grid(3, 2)
    assert nearest_grid(7) == Grid(7, 1)


def test_rows_of_three_send_the_nodes_that_cover_them() -> None:
    def work(group: FabricGroup) -> int:
        group.all_reduce(np.ones(840, FLOAT))
        return group.stats.bytes_sent

    size = 840 * FLOAT.itemsize
    assert run_ranks(thread_groups(6, parse_topology("mesh=2x3")), work) == [11 * size // 6] * 6
    assert run_ranks(thread_groups(6, parse_topology("mesh=3x2")), work) == [10 * size // 6] * 6
