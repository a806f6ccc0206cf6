"""Two homes behind translating routers, in namespaces: which rung a link takes, and what the relay carries."""

from __future__ import annotations

import pytest

from shardcompute.bench.reach.run import CASES, ReachCase, run_case
from shardcompute.node.reach.rungs import DIRECT, PUNCHED, RELAYED
from shardcompute.sim.routers import why_no_homes

KNOWN = {case.name: case for case in CASES}
pytestmark = pytest.mark.skipif(bool(why_no_homes()), reason=why_no_homes() or "it can be had")


def expect(case: ReachCase, rung: str) -> None:
    row = run_case(case, rounds=1, loads=1)
    assert row.rung == rung
    assert (row.relayed_share > 0.9) is (rung == RELAYED)


@pytest.mark.parametrize(
    ("name", "rung"), [("cone, cone", PUNCHED), ("only 443 out, cone", RELAYED)], ids=lambda each: str(each)
)
def test_homes_are_linked_on_the_best_rung_that_their_routers_allow(name: str, rung: str) -> None:
    expect(KNOWN[name], rung)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rung"),
    [
        ("cone, symmetric", RELAYED),
        ("symmetric, symmetric", RELAYED),
        ("UDP blocked, UDP blocked", PUNCHED),
        ("one home without hairpin", DIRECT),
    ],
    ids=lambda each: str(each),
)
def test_other_routers(name: str, rung: str) -> None:
    expect(KNOWN[name], rung)


@pytest.mark.long
def test_routers_that_say_no_are_passed_somehow() -> None:
    """Whether segments cross before a refusal does is a matter of luck."""
    row = run_case(KNOWN["resetting, resetting"], rounds=1, loads=1)
    assert row.rung in (PUNCHED, RELAYED)
