"""What operators are told went wrong, from one state of a cluster to the next."""

from __future__ import annotations

from shardcompute.control import events as happened
from shardcompute.node.admin.incidents import IncidentLog, view_health
from support.swarm.fake_cluster import NOW_S, FakeCluster, serving_cluster


def _watched() -> tuple[FakeCluster, IncidentLog]:
    cluster = serving_cluster(1000, 1000)
    log = IncidentLog(cluster.coordinator.state)
    cluster.coordinator.listen(log.saw)
    return cluster, log


def test_a_lost_stage_is_a_failover_and_a_new_shape() -> None:
    cluster, log = _watched()
    (chain,) = cluster.coordinator.state.live_chains()
    victim = cluster.coordinator.state.nodes[chain.nodes[0]]
    assert log.counts().failovers.get(chain.model, 0) == 0
    cluster.coordinator.post(happened.NodeLost(victim.id, victim.incarnation, "silent", NOW_S))
    cluster.coordinator.settle()
    counts = log.counts()
    assert counts.lost_nodes == 1
    assert counts.failovers[chain.model] == 1
    assert counts.replans[chain.model] == cluster.coordinator.state.chains[chain.id].epoch - chain.epoch > 0


def test_what_was_before_is_not_counted() -> None:
    cluster, _ = _watched()
    (chain,) = cluster.coordinator.state.live_chains()
    victim = cluster.coordinator.state.nodes[chain.nodes[0]]
    cluster.coordinator.post(happened.NodeLost(victim.id, victim.incarnation, "silent", NOW_S))
    later = IncidentLog(cluster.coordinator.state)
    later.saw(cluster.coordinator.state)
    assert later.counts().lost_nodes == 0
    assert not any(later.counts().failovers.values())


def test_nothing_is_a_zero_and_the_lost_are_counted_but_not_listed() -> None:
    cluster, log = _watched()
    node = next(iter(cluster.coordinator.state.nodes.values()))
    cluster.coordinator.post(happened.NodeLost(node.id, node.incarnation, "silent", NOW_S))
    health = view_health(cluster.coordinator.state, log.counts(), {}, NOW_S)
    assert health.nodes_by_status["lost"] == 1
    assert health.nodes_by_status["suspected"] == 0
    assert node.id not in {each.id for each in health.nodes}
    (model,) = health.wanted_chains
    assert health.chains_by_status[model, "broken"] == 0
    assert sum(count for (name, _), count in health.chains_by_status.items() if name == model) == 1
