"""Nodes that audits have found out: they leave every chain at once and come back by pardon alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardcompute.control import events as happened
from shardcompute.control.transitions.memorable import memorable
from shardcompute.trust.reputation import NEW


def settle(cluster: Any, node: str, finding: Any) -> None:
    cluster.tell(happened.AuditSettled(node, finding, "rows differ", "rcpt-1", 0.0))


def names(cluster: Any) -> set[str]:
    return {node for node, _, _ in cluster.shape()}


def test_a_node_that_failed_is_replaced_and_its_sessions_are_computed_again(
    serving: Callable[..., Any],
) -> None:
    cluster = serving(500, 500)
    cluster.join("c", 500)
    cluster.settle()
    assert cluster.state.chains["m#1"].used_stages
    settle(cluster, "a", "failed")
    found = cluster.state.nodes["a"]
    assert (found.status, found.reputation, found.audits_failed) == ("quarantined", 0.0, 1)
    assert "rows differ" in found.status_reason
    assert cluster.state.chains["m#1"].used_stages == (), "what others hold came of what it sent"
    cluster.settle()
    assert names(cluster) == {"b", "c"}
    assert cluster.state.chains["m#1"].status == "ready"
    assert cluster.state.nodes["a"].shards == (), "its layers are unloaded"


def test_quarantine_outlives_heartbeats_and_coming_back(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    settle(cluster, "a", "failed")
    life = cluster.state.nodes["a"].incarnation
    cluster.tell(happened.NodeSeen("a", life, 1.0))
    assert cluster.state.nodes["a"].status == "quarantined"
    assert cluster.state.nodes["a"].status_reason
    cluster.lose("a")
    cluster.join("a", 500)
    assert cluster.state.nodes["a"].status == "quarantined"
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "broken", "rather nobody than somebody who cheats"
    cluster.tell(happened.NodePardoned("a"))
    assert cluster.state.nodes["a"].reputation == NEW
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "ready"


def test_rows_that_are_withheld_cost_reputation_until_it_is_gone(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    settle(cluster, "b", "passed")
    assert cluster.state.nodes["b"].reputation > NEW
    settle(cluster, "b", "withheld")
    assert cluster.state.nodes["b"].status == "ready"
    settle(cluster, "b", "withheld")
    assert cluster.state.nodes["b"].status == "quarantined"


def test_layers_of_an_audit_stay_until_it_is_over(serving: Callable[..., Any]) -> None:
    cluster = serving(500, 500)
    life = cluster.state.nodes["a"].incarnation
    cluster.tell(happened.AuditBegun("m#77", "a", 0, 1))
    cluster.tell(happened.ShardLoaded("a", life, "m#77", "m", 0, 1, 1))
    cluster.settle()
    assert any(shard.chain == "m#77" for shard in cluster.state.nodes["a"].shards)
    assert memorable(cluster.state).audits == {}
    cluster.tell(happened.AuditEnded("m#77"))
    cluster.settle()
    assert not any(shard.chain == "m#77" for shard in cluster.state.nodes["a"].shards)
