"""Graphs that are no chain, in the placement benchmark."""

from __future__ import annotations

from shardcompute.bench.placement.graphs import GRAPHS, gathered, measure_graphs, towers_and_decoder


def test_all_orders_are_never_worse_than_one() -> None:
    found = {
        (each.metric, each.labels["method"], each.labels["graph"]): each.value for each in measure_graphs(2)
    }
    for name in GRAPHS:
        assert found["longer than the best slices", "all orders", name] == 0
        for way in ("one order", "as placed today"):
            assert found.get(("longer than the best slices", way, name), 0.0) >= -1e-9
        assert found["found", "all orders", name] >= found["found", "as placed today", name]


def test_what_lies_before_the_decoder_is_one_part_today() -> None:
    parts = towers_and_decoder(2, layers=3)
    one, *rest = gathered(parts)
    assert len(rest) == 3
    assert [part.needs for part in rest] == [(0,), (1,), (2,)]
    assert one.memory_bytes + sum(part.memory_bytes for part in rest) == sum(
        part.memory_bytes for part in parts
    )
    assert one.output_bytes == 3 * parts[0].output_bytes
