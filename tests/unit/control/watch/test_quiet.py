"""What is not asked anew at every heartbeat: answers are those that asking would give, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from shardcompute.control import ClusterState, planning
from shardcompute.control import events as happened
from shardcompute.control.placement import request as terms
from shardcompute.control.watch.quiet import is_like
from support.swarm.noisy_cluster import MIB, Machine, NoisyCluster


def cluster_of(count: int, seed: int = 0) -> NoisyCluster:
    cluster = NoisyCluster({name: Machine(memory_bytes=150 * MIB) for name in "abcdef"[:count]}, seed=seed)
    cluster.request()
    cluster.run(30)
    return cluster


def test_heartbeats_do_not_ask_for_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(4)
    asked: list[str] = []
    real = terms._request_of

    def counted(*args: object) -> object:
        asked.append("asked")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(terms, "_request_of", counted)
    cluster.run(20, 0.5)
    assert asked == []
    cluster.tell(happened.LinkMeasured("a", "b", 0.5, 1e3))
    cluster.turn()
    assert asked, "what changes a plan is asked for"
    asked.clear()
    cluster.run(60, 0.5)
    assert 0 < len(asked) < 20, (
        "a layout that has served for a minute may move: that is a moment to ask, once"
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_answers_are_those_of_asking_anew(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters with the same events; one forgets what it was answered before each look."""
    remembering, asking = cluster_of(5, seed), cluster_of(5, seed)

    def both(do: str, *args: object) -> None:
        for each in (remembering, asking):
            if each is asking:
                monkeypatch.setattr(planning, "_rest", None)
            getattr(each, do)(*args)

    def step(seconds: int) -> None:
        for _ in range(seconds):
            both("run", 1.0)

    step(90)
    both("lose", remembering.shape[0])
    step(40)
    both("join", next(name for name in "abcde" if not remembering.state.nodes[name].is_live))
    both("measure_links")
    step(100)
    both("measure_speeds")
    step(30)
    assert remembering.counts == asking.counts
    assert remembering.state == asking.state


def test_what_placement_depends_on_is_told_from_what_beats() -> None:
    cluster = cluster_of(3)
    before: ClusterState = cluster.state
    node = before.nodes["a"]
    cluster.tell(happened.NodeSeen("a", node.incarnation, cluster.now_s + 1, 123, 456))
    assert cluster.state is not before
    assert is_like(before, cluster.state)
    cluster.tell(happened.NodeSuspected("a", node.incarnation, "silent", cluster.now_s))
    assert not is_like(before, cluster.state)
