"""A machine that is silent and that nobody can stand in for is waited for, longer than others but not forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardcompute.control import COORDINATOR, Record, next_actions
from shardcompute.control import events as happened


def decisions(cluster: Any, now_s: float) -> list[str]:
    """What is decided at this time; it is so from then on."""
    cluster.now_s = now_s
    actions = next_actions(cluster.state, now_s)
    events = [action.event for action in actions if isinstance(action, Record)]
    cluster.tell(*events)
    return [type(event).__name__ for event in events]


def hear(cluster: Any, until_s: float, *silent: str) -> None:
    """Heartbeats of all others from the last time until now."""
    since_s = cluster.now_s
    beats = max(1, round((until_s - since_s) / 0.5))
    for beat in range(1, beats + 1):
        for node in set(cluster.state.nodes) - set(silent):
            at_s = since_s + (until_s - since_s) * beat / beats
            cluster.tell(happened.NodeSeen(node, cluster.state.nodes[node].incarnation, at_s))


def test_nobody_can_stand_in_so_nothing_is_given_up(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    for now_s in (1.0, 2.0, 5.0, 9.9):
        hear(cluster, now_s, "a")
        decided = decisions(cluster, now_s)
        assert decided == (["NodeSuspected"] if now_s == 1.0 else [])
    assert (cluster.state.chains["m#1"].status, cluster.state.chains["m#1"].epoch) == ("ready", 1)
    hear(cluster, 9.95)
    assert cluster.state.nodes["a"].status == "ready"
    assert decisions(cluster, 10.0) == []


def test_it_is_given_up_in_the_end(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    hear(cluster, 44.0, "a")
    assert decisions(cluster, 44.0) == ["NodeSuspected"]
    hear(cluster, 45.0, "a")
    assert decisions(cluster, 45.0) == ["NodeLost", "ChainBroken"]


def test_as_soon_as_somebody_can_stand_in_it_is_lost(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    hear(cluster, 3.0, "a")
    assert decisions(cluster, 3.0) == ["NodeSuspected"]
    cluster.join("c", 500, now_s=3.0)
    assert decisions(cluster, 3.1)[:2] == ["NodeLost", "ChainReshaped"]


def test_a_driver_that_hears_nobody_waits_for_all_of_them(serving: Callable[..., Any]) -> None:
    """A spare machine that is silent as well can stand in for nobody."""
    cluster = serving(500, 500)
    cluster.join("spare", 500)
    cluster.settle()
    assert decisions(cluster, 4.0).count("NodeSuspected") == 3
    statuses = {id: node.status for id, node in cluster.state.nodes.items()}
    assert statuses == {"a": "suspected", "b": "suspected", "spare": "lost"}
    assert cluster.state.chains["m#1"].epoch == 1


@pytest.mark.parametrize("accuser", [COORDINATOR, "b"])
def test_one_that_others_cannot_reach_either_is_not_waited_for(
    serving: Callable[..., Any], accuser: str
) -> None:
    cluster = serving(500, 500)
    hear(cluster, 1.5, "a")
    cluster.tell(happened.LinkBroken(accuser, "a", 1.5))
    hear(cluster, 3.5, "a")
    assert "NodeLost" in decisions(cluster, 3.5)


def test_one_that_holds_nothing_is_not_waited_for(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.join("idle", 10)
    hear(cluster, 2.0, "idle")
    assert decisions(cluster, 2.0) == ["NodeSuspected", "NodeLost"]


def test_whoever_is_heard_of_first_after_a_blackout_of_our_own_buries_nobody(
    serving: Callable[..., Any],
) -> None:
    cluster = serving(500, 500)
    cluster.join("spare", 500)
    cluster.settle()
    assert decisions(cluster, 1.6).count("NodeSuspected") == 3
    hear(cluster, 1.7, "a")
    assert decisions(cluster, 1.7) == []
    hear(cluster, 3.4, "a")
    assert decisions(cluster, 3.4) == [], "a has time until 3.45"
    assert decisions(cluster, 3.45)[:2] == ["NodeLost", "ChainReshaped"]
