"""What changes, and what stays as it was."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.sim import Change, apply_change, initial_conditions, load_topology
from shardcompute.sim.conditions import from_json, to_json

CONDITIONS = initial_conditions(load_topology("continents"), ["a", "b", "c", "d", "e"])


def test_machines_are_spread_over_regions_in_turn() -> None:
    assert CONDITIONS.path("a", "c").delay_s == CONDITIONS.path("c", "a").delay_s == 0.0475
    assert CONDITIONS.path("a", "e").delay_s == 0.001, "the fifth machine is in the first region again"
    assert CONDITIONS.port("d").uplink_bytes_per_s == 2.5e6


def test_conditions_travel() -> None:
    assert from_json(to_json(CONDITIONS)) == CONDITIONS


def test_a_machine_changes_alone() -> None:
    now = apply_change(CONDITIONS, Change(machines=("b",), uplink_mbit=1, is_cut=True))
    assert now.port("b").uplink_bytes_per_s == 125_000
    assert now.port("b").downlink_bytes_per_s == CONDITIONS.port("b").downlink_bytes_per_s
    assert now.port("a") == CONDITIONS.port("a")
    assert now.path("b", "a").is_cut
    assert now.path("a", "b").is_cut
    assert now.path("a", "c") == CONDITIONS.path("a", "c")


def test_a_pair_changes_alone() -> None:
    now = apply_change(CONDITIONS, Change(between=("a", "c"), delay_ms=200, uplink_mbit=1))
    changed = {(x, y) for x in now.machines for y in now.machines if now.path(x, y) != CONDITIONS.path(x, y)}
    assert changed == {("a", "c"), ("c", "a")}
    assert now.ports == CONDITIONS.ports


def test_everybody_changes() -> None:
    now = apply_change(CONDITIONS, Change(loss=0.01, jitter_ms=50))
    assert {(path.loss, path.jitter_s) for row in now.paths for path in row} == {(0.01, 0.05)}


@pytest.mark.parametrize(
    "change",
    [
        Change(machines=("z",)),
        Change(between=("a", "z")),
        Change(uplink_mbit=0),
        Change(loss=1.0),
        Change(delay_ms=-1),
    ],
)
def test_impossible_changes(change: Change) -> None:
    with pytest.raises(UsageError):
        apply_change(CONDITIONS, change)


def test_machines_have_names_of_their_own() -> None:
    with pytest.raises(UsageError):
        initial_conditions(load_topology("lan"), ["a", "a"])
