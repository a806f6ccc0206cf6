"""Homes with IPv6, alone, beside IPv4, and broken, in namespaces: which rung a link takes."""

from __future__ import annotations

import pytest

from shardcompute.bench.reach.run import CASES, run_case
from shardcompute.node.reach.rungs import CALLBACK, DIRECT, PUNCHED, RELAYED
from shardcompute.sim.routers import why_no_homes

KNOWN = {case.name: case for case in CASES}
WHY = why_no_homes(with_ipv6=True)
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "it can be had")


@pytest.mark.parametrize(
    ("name", "rungs"),
    [
        ("IPv6 lost on the way, twice", {PUNCHED}),
        pytest.param("IPv6 only, open", {DIRECT}, marks=pytest.mark.long),
        pytest.param("IPv6 only, firewalls", {PUNCHED}, marks=pytest.mark.long),
        pytest.param("dual stack, firewalls", {PUNCHED}, marks=pytest.mark.long),
        pytest.param("IPv6 only, IPv4 only", {RELAYED, CALLBACK}, marks=pytest.mark.long),
    ],
)
def test_homes_are_linked_whatever_their_ipv6_is_like(name: str, rungs: set[str]) -> None:
    row = run_case(KNOWN[name], rounds=1, loads=1)
    assert row.rung in rungs
    assert (row.relayed_share > 0.9) is (row.rung == RELAYED)
