"""Nodes whose owners do not let them work for a while: relieved calmly, then left alone, then used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardcompute.control import events as happened
from shardcompute.control import next_actions


def rest(cluster: Any, node: str, reason: str = "on battery", *, is_at_rest: bool = False) -> None:
    life = cluster.state.nodes[node].incarnation
    cluster.tell(happened.NodeRested(node, life, reason, is_at_rest))


def names(cluster: Any) -> set[str]:
    return {node for node, _, _ in cluster.shape()}


def test_a_node_that_must_rest_is_replaced_before_it_stops_and_is_not_sent_away(
    serving: Callable[..., Any],
) -> None:
    cluster = serving(500, 500)
    rest(cluster, "a")
    assert cluster.state.nodes["a"].status == "draining"
    assert next_actions(cluster.state, 0.0) == []
    cluster.join("c", 500)
    done = [type(action).__name__ for action in cluster.settle()]
    assert "ReleaseNode" not in done
    assert names(cluster) == {"b", "c"}
    assert cluster.state.nodes["a"].shards == ()
    rest(cluster, "a", is_at_rest=True)
    assert cluster.state.nodes["a"].status == "resting"
    assert next_actions(cluster.state, 0.0) == []


def test_a_node_that_nobody_can_replace_rests_with_its_layers_and_goes_on_with_them(
    serving: Callable[..., Any],
) -> None:
    cluster = serving(500, 500)
    before = cluster.shape()
    rest(cluster, "a")
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "ready"
    rest(cluster, "a", is_at_rest=True)
    cluster.settle()
    chain = cluster.state.chains["m#1"]
    assert chain.status == "broken"
    held = cluster.state.nodes["a"].shards
    assert held
    cluster.log.clear()
    rest(cluster, "a", "")
    done = [type(action).__name__ for action in cluster.settle()]
    assert cluster.state.chains["m#1"].status == "ready"
    assert cluster.shape() == before
    assert cluster.state.nodes["a"].shards == held
    assert "LoadShard" not in done


def test_a_node_at_rest_gets_no_work_not_even_where_it_must_be(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.join("c", 500)
    cluster.settle()
    rest(cluster, "c", is_at_rest=True)
    cluster.lose("a")
    cluster.settle()
    assert "c" not in names(cluster)
    rest(cluster, "c", "")
    cluster.settle()
    assert names(cluster) == {"b", "c"}


def test_a_node_says_again_that_it_rests_when_it_registers(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    shards = cluster.state.nodes["a"].shards
    cluster.join("a", 500, shards=shards, rest_reason="on battery", is_at_rest=True)
    assert cluster.state.nodes["a"].status == "resting"
    assert cluster.state.chains["m#1"].is_interrupted
    cluster.seen()
    assert cluster.state.nodes["a"].status == "resting"
    cluster.join("a", 500, shards=shards)
    cluster.settle()
    assert cluster.state.nodes["a"].status == "ready"
    assert cluster.state.chains["m#1"].status == "ready"


def test_a_node_that_is_drained_leaves_whether_or_not_it_may_work(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500, 500)
    rest(cluster, "a")
    cluster.tell(happened.NodeDrained("a"))
    for reason in ("on battery", ""):
        rest(cluster, "a", reason)
        assert cluster.state.nodes["a"].is_draining
    cluster.join("a", 500, shards=cluster.state.nodes["a"].shards, rest_reason="on battery")
    cluster.settle()
    assert cluster.state.nodes["a"].status == "gone"


def test_news_of_a_former_life_is_ignored(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    cluster.tell(happened.NodeRested("a", 7, "on battery", True), happened.NodeRested("x", 1, "on battery"))
    assert cluster.state.nodes["a"].status == "ready"
