"""Links that do not hold: counted, closed, planned around, and tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardcompute.control import ClusterState, apply, next_actions
from shardcompute.control import events as happened
from shardcompute.control.actions import ProbeLink
from shardcompute.control.events import Event, is_journalled


def break_link(cluster: Any, reporter: str, node: str) -> None:
    """The link breaks, and the chain is connected anew, but its driver does not come to use it."""
    cluster.tell(happened.LinkBroken(reporter, node, cluster.now_s))
    for _ in range(3):
        actions = next_actions(cluster.state, cluster.now_s)
        for action in actions:
            if type(action).__name__ != "ActivateChain":
                cluster.answer(action)


def probes(cluster: Any) -> list[ProbeLink]:
    return [each for each in next_actions(cluster.state, cluster.now_s) if isinstance(each, ProbeLink)]


def closed(cluster: Any) -> set[tuple[str, str]]:
    links = (link for row in cluster.state.links.values() for link in row.values())
    return {(link.a, link.b) for link in links if not link.is_open}


@pytest.fixture
def pair(serving: Callable[..., Any]) -> Any:
    """Two machines that each hold half of the model, at a distance from each other."""
    cluster = serving(500, 500)
    cluster.tell(happened.LinkMeasured("a", "b", 0.02, 1e6))
    return cluster


def test_a_link_that_breaks_too_often_is_closed_and_planned_around(pair: Any) -> None:
    first, second = (node for node, _, _ in pair.shape())
    for _ in range(2):
        break_link(pair, first, second)
        assert closed(pair) == set()
    pair.join("c", 500)
    break_link(pair, first, second)
    assert closed(pair) == {("a", "b")}
    link = pair.state.link("a", "b")
    assert (link.rtt_s, link.bytes_per_s) == (0.02, 1e6), "what was measured is not forgotten"
    pair.settle()
    assert {node for node, _, _ in pair.shape()} != {"a", "b"}
    assert pair.state.link_breaks == ()


def test_a_chain_that_serves_in_between_forgives_its_links(pair: Any) -> None:
    first, second = (node for node, _, _ in pair.shape())
    for _ in range(5):
        break_link(pair, first, second)
        pair.settle()
        break_link(pair, first, second)
        pair.settle()
    assert closed(pair) == set()


def test_machines_that_may_be_dead_say_nothing_about_the_link(pair: Any) -> None:
    first, second = (node for node, _, _ in pair.shape())
    pair.tell(happened.NodeSuspected(second, 1, "no heartbeat", 0.0))
    pair.tell(happened.LinkBroken(first, second, 0.0))
    assert pair.state.link_breaks == ()


def test_whoever_could_not_reach_the_other_tries_now_and_then(pair: Any) -> None:
    pair.tell(happened.LinkClosed("b", "a", 0.0))
    assert probes(pair) == []
    pair.now_s = 30.0
    pair.seen()
    assert probes(pair) == [ProbeLink("b", "a")]
    pair.answer(ProbeLink("b", "a"))
    assert probes(pair) == []
    pair.now_s = 60.0
    pair.seen()
    assert probes(pair) == [ProbeLink("b", "a")]
    pair.tell(happened.LinkMeasured("b", "a", 0.01, 1e6))
    assert (probes(pair), closed(pair)) == ([], set())


def test_the_coordinators_driver_is_probed_by_its_peer(pair: Any) -> None:
    pair.tell(happened.LinkClosed("driver", "a", 0.0))
    pair.now_s = 30.0
    pair.seen()
    assert probes(pair) == [ProbeLink("a", "driver")]


def test_nobody_is_asked_to_probe_who_is_not_there(pair: Any) -> None:
    pair.tell(happened.LinkClosed("a", "b", 0.0))
    pair.now_s = 30.0
    pair.seen()
    for gone in ("a", "b"):
        state = apply(pair.state, happened.NodeLost(gone, 1, "died", 30.0))
        assert not any(isinstance(each, ProbeLink) for each in next_actions(state, 30.0))


def test_a_coordinator_that_starts_again_probes_what_it_remembers_as_closed(pair: Any) -> None:
    """Its clock is another one, and whoever registers anew may find the link still down."""
    story: list[Event] = [happened.LinkClosed("a", "b", 5000.0)]
    assert all(is_journalled(event) for event in story)
    pair.tell(*story)
    pair.now_s = 1.0
    pair.tell(happened.CoordinatorStarted(1.0))
    assert pair.state.link_breaks == ()
    assert probes(pair) == [], "nobody has shown up yet"
    pair.seen()
    assert probes(pair) == [ProbeLink("a", "b")]
    pair.answer(ProbeLink("a", "b"))
    pair.now_s = 31.0
    pair.seen()
    assert probes(pair) == [ProbeLink("a", "b")], "and again, as long as it is closed"


def test_counts_are_of_now_and_not_written_down(pair: Any) -> None:
    first, second = (node for node, _, _ in pair.shape())
    break_link(pair, first, second)
    assert [each.count for each in pair.state.link_breaks] == [1]
    pair.tell(happened.CoordinatorStarted(1.0))
    assert pair.state.link_breaks == ()
    assert not is_journalled(happened.LinkProbed("a", "b", 0.0))


def test_of_links_that_nobody_knows_nothing_is_noted() -> None:
    state = ClusterState()
    assert apply(state, happened.LinkProbed("a", "b", 1.0)) == state
    assert apply(state, happened.LinkClosed("a", "a", 1.0)) == state
