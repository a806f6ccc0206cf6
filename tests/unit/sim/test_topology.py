"""Topologies: what is shipped can be read, what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.sim import load_topology, parse_topology, ring_topology, topology_names

GOOD = """
regions = ["here", "there"]
rtt_ms = [[1, 30], [30, 2]]
uplink_mbit = [10, 50]
downlink_mbit = 100
jitter_ms = 3
loss = [0, 0.01]
"""


def test_shipped_topologies_are_sound() -> None:
    assert {"lan", "home-20ms", "home-80ms", "home-200ms", "thin-uplink"} <= set(topology_names())
    for name in topology_names():
        topology = load_topology(name)
        assert topology.description
        assert len(topology.rtt_ms) == len(topology.regions)


@pytest.mark.parametrize("ring_ms", [20, 80, 200])
def test_homes_are_as_far_apart_as_their_name_says(ring_ms: int) -> None:
    shipped, made = load_topology(f"home-{ring_ms}ms"), ring_topology(4, ring_ms, 100)
    assert shipped.rtt_ms == made.rtt_ms
    assert shipped.regions == made.regions
    one_way = [shipped.rtt_ms[a][(a + 1) % 4] / 2 for a in range(4)]
    assert sum(one_way) == ring_ms


def test_values_are_for_all_regions_or_for_each() -> None:
    here, there = parse_topology("two", GOOD).regions
    assert (here.uplink_mbit, there.uplink_mbit) == (10, 50)
    assert (here.downlink_mbit, there.downlink_mbit) == (100, 100)
    assert (here.queue_ms, here.jitter_ms, here.loss, there.loss) == (100, 3, 0, 0.01)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("regions =", "places =", "places"),
        ('"there"]', '"here"]', "same name"),
        ("[30, 2]", "[31, 2]", "between there and here is given as 31 and 30"),
        ("[30, 2]", "[30]", "2 rows of 2"),
        ("[10, 50]", "[10, 50, 60]", "uplink_mbit has 3 numbers for 2 regions"),
        ("[10, 50]", "[10, 0]", "uplink_mbit"),
        ("100", '"fast"', "downlink_mbit"),
        ("[0, 0.01]", "1.5", "loss"),
        ("jitter_ms = 3", "jitter_ms = -3", "jitter_ms"),
    ],
)
def test_what_is_wrong_is_named(before: str, after: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_topology("two", GOOD.replace(before, after, 1))


def test_topologies_from_files(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_topology(str(path)).name == "two"
    with pytest.raises(SourceError, match="missing"):
        load_topology(str(tmp_path / "missing.toml"))
    with pytest.raises(UsageError, match="no topology is called 'moon'") as raised:
        load_topology("moon")
    assert "home-80ms" in raised.value.hint


def test_impossible_rings() -> None:
    with pytest.raises(UsageError):
        ring_topology(1, 80, 100)
    with pytest.raises(UsageError):
        ring_topology(4, 80, 0)
