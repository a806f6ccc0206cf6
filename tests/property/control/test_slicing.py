"""Slices of small graphs against all that there are."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.control.solver.slicing import (
    GraphPart,
    SlicedGraph,
    SlicingMachine,
    fastest_slices,
    slice_graph,
)
from shardcompute.core.errors import UsageError

numbers = st.integers(1, 9).map(float)


@st.composite
def graphs(draw: st.DrawFn) -> list[GraphPart]:
    count = draw(st.integers(1, 6))
    return [
        GraphPart(
            draw(numbers),
            draw(numbers),
            draw(numbers),
            tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=3)))) if index else (),
        )
        for index in range(count)
    ]


machines = st.lists(
    st.builds(SlicingMachine, numbers, st.integers(4, 40).map(float), st.sampled_from([0.0, 2.0]), numbers),
    min_size=1,
    max_size=3,
)


def judge(parts: list[GraphPart], over: list[SlicingMachine], place: tuple[int, ...]) -> tuple[float, float]:
    """Latency and bottleneck of parts on machines; infinite where that cannot be. Written without down-sets."""
    if any(place[need] > place[index] for index, part in enumerate(parts) for need in part.needs):
        return inf, inf
    latency_s = slowest_s = 0.0
    for number, machine in enumerate(over):
        mine = [part for index, part in enumerate(parts) if place[index] == number]
        if sum(part.memory_bytes for part in mine) > machine.memory_bytes:
            return inf, inf
        stage_s = sum(part.work_bytes for part in mine) * machine.seconds_per_byte
        latency_s, slowest_s = latency_s + stage_s, max(slowest_s, stage_s)
        if number < len(over) - 1:
            crossing = sum(
                part.output_bytes
                for index, part in enumerate(parts)
                if place[index] <= number
                and any(index in user.needs and place[at] > number for at, user in enumerate(parts))
            )
            latency_s += machine.hop_s + crossing / machine.bytes_per_s
            slowest_s = max(slowest_s, crossing / machine.bytes_per_s)
    return latency_s, slowest_s


def place_of(found: SlicedGraph, count: int) -> tuple[int, ...]:
    where = {part: number for number, each in enumerate(found.slices) for part in each}
    return tuple(where[part] for part in range(count))


@settings(deadline=None, max_examples=60)
@given(graphs(), machines)
def test_no_slices_are_better(parts: list[GraphPart], over: list[SlicingMachine]) -> None:
    every = [judge(parts, over, place) for place in product(range(len(over)), repeat=len(parts))]
    found = slice_graph(parts, over)
    least = min(latency_s for latency_s, _ in every)
    if least == inf:
        assert found is None
        assert fastest_slices(parts, over) is None
        return
    assert found is not None
    assert found.is_exact
    assert found.latency_s == pytest.approx(least)
    assert judge(parts, over, place_of(found, len(parts))) == pytest.approx(
        (found.latency_s, found.bottleneck_s)
    )
    fastest = fastest_slices(parts, over)
    assert fastest is not None
    assert fastest.bottleneck_s == pytest.approx(min(slowest_s for _, slowest_s in every), rel=1e-4)


def branches(encoder: int, decoder: int) -> list[GraphPart]:
    """An encoder and a decoder whose every layer reads what the encoder says."""
    first = [GraphPart(1.0, 1.0, 8.0, (n - 1,) if n else ()) for n in range(encoder)]
    last = encoder - 1
    return [
        *first,
        *(GraphPart(1.0, 1.0, 1.0, (last,) if n == 0 else (last, encoder + n - 1)) for n in range(decoder)),
    ]


def test_too_many_down_sets_are_cut_in_one_order() -> None:
    towers = [GraphPart(1.0, 1.0, 1.0, (n - 1,) if n % 4 else ()) for n in range(16)]
    over = [SlicingMachine(1.0, 9.0, 0.0, 1.0)] * 2
    exact, ordered = slice_graph(towers, over), slice_graph(towers, over, most_down_sets=20)
    assert exact is not None
    assert ordered is not None
    assert (exact.is_exact, ordered.is_exact) == (True, False)
    assert exact.latency_s <= ordered.latency_s


def test_a_decoder_is_not_cut_before_its_encoder_is_done() -> None:
    found = slice_graph(branches(3, 3), [SlicingMachine(1.0, 3.0, 1.0, 1.0)] * 2)
    assert found is not None
    assert found.slices == ((0, 1, 2), (3, 4, 5))
    assert found.latency_s == 6 + 1 + 8


@pytest.mark.parametrize("parts", [[], [GraphPart(1, 1, 1, (0,))], [GraphPart(1, 1, 1, (-1,))]])
def test_what_is_no_graph_is_refused(parts: list[GraphPart]) -> None:
    with pytest.raises(UsageError):
        slice_graph(parts, [SlicingMachine(1.0, 1.0)])
