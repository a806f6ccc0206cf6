from __future__ import annotations

from typing import Any

import pytest

from shardcompute.control import COORDINATOR, needs_rejoin
from shardcompute.control import events as happened
from shardcompute.control.health import next_health_events


def test_silence_is_suspected_then_lost_within_two_seconds(cluster: Any) -> None:
    cluster.join("a")
    assert next_health_events(cluster.state, 0.99) == []
    [suspected] = next_health_events(cluster.state, 1.0)
    assert isinstance(suspected, happened.NodeSuspected)
    cluster.tell(suspected)
    assert cluster.state.nodes["a"].status == "suspected"
    assert next_health_events(cluster.state, 1.7) == []
    [lost] = next_health_events(cluster.state, 1.75)
    assert isinstance(lost, happened.NodeLost)
    assert lost.reason == "no heartbeat"


def test_a_heartbeat_clears_suspicion_but_does_not_raise_the_dead(cluster: Any) -> None:
    cluster.join("a")
    cluster.tell(happened.NodeSuspected("a", 1, "no heartbeat", 1.0), happened.NodeSeen("a", 1, 1.2))
    assert cluster.state.nodes["a"].status == "ready"
    assert cluster.state.nodes["a"].lease_until_s == 1.2 + 1.75
    assert not needs_rejoin(cluster.state, "a", 1)
    cluster.lose("a")
    cluster.tell(happened.NodeSeen("a", 1, 1.3))
    assert cluster.state.nodes["a"].status == "lost"
    assert needs_rejoin(cluster.state, "a", 1)
    assert needs_rejoin(cluster.state, "stranger", 1)


def test_a_late_heartbeat_does_not_turn_time_back(cluster: Any) -> None:
    cluster.join("a", now_s=5.0)
    cluster.tell(happened.NodeSeen("a", 1, 3.0))
    assert cluster.state.nodes["a"].last_seen_s == 5.0


def suspect_after(cluster: Any, *accusations: happened.LinkBroken) -> None:
    cluster.tell(*accusations)
    [suspected] = next_health_events(cluster.state, 0.1)
    cluster.tell(suspected)


def test_a_reset_control_link_alone_leaves_time_to_dial_again(cluster: Any) -> None:
    cluster.join("a")
    suspect_after(cluster, happened.LinkBroken(COORDINATOR, "a", 0.1))
    assert next_health_events(cluster.state, 1.84) == []
    assert isinstance(next_health_events(cluster.state, 1.85)[0], happened.NodeLost)


@pytest.mark.parametrize("reporters", [(COORDINATOR, "b"), ("b", COORDINATOR), ("driver", COORDINATOR)])
def test_one_that_a_neighbour_cannot_reach_either_is_lost_soon(
    cluster: Any, reporters: tuple[str, str]
) -> None:
    for name in "ab":
        cluster.join(name)
    suspect_after(cluster, *(happened.LinkBroken(reporter, "a", 0.1) for reporter in reporters))
    assert next_health_events(cluster.state, 0.59) == []
    assert isinstance(next_health_events(cluster.state, 0.6)[0], happened.NodeLost)


def test_two_neighbours_are_believed_one_is_not(cluster: Any) -> None:
    for name in "abc":
        cluster.join(name)
    cluster.tell(happened.LinkBroken("a", "b", 0.1), happened.LinkBroken("a", "b", 0.2))
    assert next_health_events(cluster.state, 0.2) == []
    cluster.tell(happened.LinkBroken("c", "b", 0.3))
    [suspected] = next_health_events(cluster.state, 0.3)
    assert (suspected.node, suspected.reason) == ("b", "2 neighbours cannot reach it")


def test_strangers_and_the_dead_accuse_in_vain(cluster: Any) -> None:
    for name in "abc":
        cluster.join(name)
    cluster.lose("c")
    cluster.tell(happened.LinkBroken("stranger", "b", 0.1), happened.LinkBroken("c", "b", 0.1))
    assert cluster.state.nodes["b"].accusers == ()


def test_a_drained_machine_that_vanishes_without_work_has_left(cluster: Any) -> None:
    cluster.join("a")
    cluster.tell(happened.NodeDrained("a"), happened.NodeLost("a", 1, "no heartbeat", 2.0))
    assert (cluster.state.nodes["a"].status, cluster.state.nodes["a"].status_reason) == ("gone", "left")
