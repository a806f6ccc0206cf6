"""Where a model is cut for a run: no cut has a cheaper most costly stage."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardcompute.finetune.swarm.balance import balance_stages
from shardcompute.finetune.swarm.frames import in_flight, one_forward_one_backward


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    head=st.integers(0, 30),
    count=st.integers(1, 7),
)
def test_no_other_cut_is_better(costs: list[int], head: int, count: int) -> None:
    count = min(count, len(costs))

    def worst(edges: tuple[int, ...]) -> int:
        sums = [sum(costs[start:stop]) for start, stop in pairwise(edges)]
        return max(*sums[:-1], sums[-1] + head, 0)

    found = balance_stages([float(each) for each in costs], float(head), count)
    edges = (0, *(stage.stop for stage in found))
    assert edges[-1] == len(costs)
    assert all(stage.start < stage.stop for stage in found)
    inner = combinations(range(1, len(costs)), count - 1)
    assert worst(edges) == min(worst((0, *each, len(costs))) for each in inner)


def test_the_stage_with_the_head_gets_fewer_layers() -> None:
    first, last = balance_stages([1.0] * 30, 8.0, 2)
    assert (first.count, last.count) == (19, 11)


@given(place=st.integers(0, 5), behind=st.integers(0, 5), count=st.integers(1, 12), more=st.integers(0, 4))
def test_more_under_way_are_never_more_than_reserved(place: int, behind: int, count: int, more: int) -> None:
    stages = place + behind + 1
    order = one_forward_one_backward(place, stages, count, more)
    held = most = 0
    for what, _ in order:
        held += 1 if what == "forward" else -1
        most = max(most, held)
    assert most == in_flight(place, stages, count, more)
    for way in ("forward", "backward"):
        assert [number for what, number in order if what == way] == list(range(count))
