"""How long a move waits for sessions to travel, and what is left where a stage was."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.state import Assignment, Chain, ClusterState, LayerTime
from shardcompute.control.transitions.state_updates import with_node
from shardcompute.control.watch.kv_travel import estimate_travel
from support.swarm.noisy_cluster import MIB, SMALL, Machine, NoisyCluster


@pytest.fixture
def moving() -> tuple[NoisyCluster, Chain, tuple[Assignment, ...]]:
    """A chain that is about to go from one of its machines to another, for twice the speed."""
    cluster = NoisyCluster({name: Machine(memory_bytes=150 * MIB, rtt_s=0.02) for name in "abcd"}, noise=0.0)
    cluster.request()
    cluster.run(300, 5)
    [chain] = cluster.state.live_chains()
    assert chain.status == "ready"
    spare = next(name for name in cluster.machines if name not in chain.members)
    last = chain.stages[-1]
    stages = (*chain.stages[:-1], Assignment(spare, last.start, last.stop))
    cluster.tell(
        happened.MovePlanned(
            chain.id,
            chain.epoch,
            stages,
            "why",
            False,
            cluster.now_s,
            expected_before_s=0.02,
            expected_after_s=0.01,
        )
    )
    return cluster, cluster.state.live_chains()[0], stages


def holding(state: ClusterState, chain: Chain, tokens: int, row_s: float = 1e-4) -> ClusterState:
    for stage in chain.stages:
        held = tokens * SMALL.kv_bytes_per_token_and_layer * (stage.stop - stage.start)
        state = with_node(state, replace(state.nodes[stage.node], kv_used_bytes=held))
    for node in state.nodes.values():
        state = with_node(state, replace(node, layer_times=(LayerTime(SMALL.name, 1e-3, prefill_s=row_s),)))
    return state


def test_sessions_travel_where_that_is_sooner_than_computing_them_again(
    moving: tuple[NoisyCluster, Chain, tuple[Assignment, ...]],
) -> None:
    cluster, chain, stages = moving
    new, old = stages[-1], chain.stages[-1]
    layers = new.stop - new.start
    state = holding(cluster.state, chain, 10_000)
    for rate, pays in ((1e9, True), (1e5, False)):
        a, b = sorted((old.node, new.node))
        cluster.state = state
        cluster.tell(happened.LinkMeasured(a, b, 0.001, rate))
        cluster.tell(happened.LinkMeasured(a, b, 0.001, rate))
        travel = estimate_travel(cluster.state, chain, stages)
        assert travel.replay_s == pytest.approx(10_000 * 1e-4 * layers)
        assert travel.limit_s == pytest.approx(2 * travel.replay_s), "half the speed is lost while it waits"
        assert travel.copy_s == pytest.approx(10_000 * 768 * layers / rate, rel=0.01)
        assert travel.pays is pays


def test_whoever_empties_a_machine_waits_however_long_it_takes(
    moving: tuple[NoisyCluster, Chain, tuple[Assignment, ...]],
) -> None:
    cluster, chain, stages = moving
    state = holding(cluster.state, chain, 10_000)
    urgent = replace(state, moves=tuple(replace(move, is_urgent=True) for move in state.moves))
    assert estimate_travel(urgent, chain, stages).limit_s == inf
    assert estimate_travel(holding(cluster.state, chain, 0), chain, stages).pays


def test_a_stage_that_was_left_whole_stands_by_with_what_it_holds(
    moving: tuple[NoisyCluster, Chain, tuple[Assignment, ...]],
) -> None:
    cluster, chain, stages = moving
    left = chain.stages[-1]
    reshaped = happened.ChainReshaped(chain.id, chain.epoch + 1, stages, "why", cluster.now_s)
    before = cluster.state
    cluster.tell(reshaped)
    assert left in cluster.state.live_chains()[0].standbys
    cluster.state = before
    cluster.tell(happened.NodeDrained(left.node))
    cluster.tell(reshaped)
    assert left not in cluster.state.live_chains()[0].standbys, "it is to be emptied"
