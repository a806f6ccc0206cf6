"""Which algorithm is chosen, by size and by what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.collectives import Algorithm, FabricGroup, run_ranks, thread_groups
from shardcompute.collectives.line_speeds import (
    CROWDED_FRAME_S,
    LineSpeed,
    LineSpeeds,
    all_reduce_s,
    choose_all_reduce,
)
from shardcompute.collectives.measuring import measure_lines
from shardcompute.collectives.topology import nearest_grid
from shardcompute.core.errors import CollectiveError

LAN = LineSpeed(100e-6, 117e6)
FAR = LineSpeed(20e-3, 12e6)


def choose(size_bytes: int, ranks: int, line: LineSpeed) -> Algorithm:
    return choose_all_reduce(size_bytes, ranks, nearest_grid(ranks), line)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_small_arrays_of_few_ranks_are_exchanged_directly(ranks: int) -> None:
    assert choose(8192, ranks, LAN) is Algorithm.DIRECT
    assert choose(8192, ranks, FAR) is Algorithm.DIRECT


@pytest.mark.parametrize("ranks", [3, 4, 6, 8])
def test_large_arrays_are_added_by_pieces(ranks: int) -> None:
    assert choose(16 << 20, ranks, LAN) in (Algorithm.MESH, Algorithm.RING)


def test_ranks_that_share_cores_send_fewer_frames() -> None:
    """Four ranks on two cores: partners in turn, where ranks with a core each send to all at once."""
    crowded = LineSpeed(25e-6, 4e9, CROWDED_FRAME_S)
    assert choose(8192, 4, crowded) is Algorithm.DOUBLING
    assert choose(8192, 4, LineSpeed(25e-6, 4e9)) is Algorithm.DIRECT


def test_latency_moves_the_border() -> None:
    """What is large for a near line is small for a far one."""
    assert choose(256 << 10, 8, LAN) is not choose(8 << 10, 8, FAR)
    sizes = [1 << power for power in range(10, 26)]
    first = {
        line: next(size for size in sizes if choose(size, 8, line) is Algorithm.MESH) for line in (LAN, FAR)
    }
    assert first[LAN] < first[FAR]


def test_the_choice_is_the_least_of_what_is_expected() -> None:
    for ranks in range(2, 9):
        for size in (1 << 10, 1 << 16, 1 << 22):
            grid = nearest_grid(ranks)
            expected = {each: all_reduce_s(each, size, ranks, grid, LAN) for each in Algorithm}
            assert expected[choose(size, ranks, LAN)] == min(expected.values())


def test_a_group_goes_by_its_slowest_line() -> None:
    latency_s = np.array([[0, 1, 5], [1, 0, 2], [5, 2, 0]]) * 1e-3
    speeds = LineSpeeds(latency_s, 1e9 / (1 + latency_s), np.array([1e-5, 2e-5, 1e-5]))
    assert speeds.among([0, 1]).latency_s == 1e-3
    assert speeds.among([0, 1, 2]).latency_s == 5e-3
    assert speeds.among([0, 2]).frame_s == 1e-5
    assert speeds.among([0, 1]).frame_s == 2e-5
    assert speeds.among([2]) == LineSpeed()


def test_measured_figures_are_used_by_groups_that_are_split_off() -> None:
    def work(group: FabricGroup) -> bool:
        measure_lines(group)
        assert group.world.speeds is not None
        return group.split([0, 1, 2]).line == group.line == group.world.speeds.among([0, 1, 2])

    assert run_ranks(thread_groups(3), work) == [True] * 3


def test_a_rank_that_tells_nonsense_ends_the_forming() -> None:
    def work(group: FabricGroup) -> None:
        if group.rank == 0:
            measure_lines(group)
        else:
            for _ in range(12):
                group.send(group.receive(0), 0)
            group.all_gather(np.full((2, 2), np.nan))

    with pytest.raises(CollectiveError, match="rank 1 tells no speeds"):
        run_ranks(thread_groups(2), work)
