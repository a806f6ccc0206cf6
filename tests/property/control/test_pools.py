"""Open pools: limits hold for any schedule of joins, and no layout gives a stranger what it must not have."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.control import ClusterState, Model, Placement, PlacementPolicy, apply
from shardcompute.control import events as happened
from shardcompute.control.placement.place import place
from shardcompute.control.placement.replacement import Replacement, replace_stage
from shardcompute.control.placement.request import placement_request
from shardcompute.control.sizes import memory_of
from shardcompute.control.state import Assignment
from shardcompute.trust.pools import (
    PoolMember,
    PoolPolicy,
    admitted,
    after_finding,
    may_audit,
    network_of,
    rate_of,
    why_refused,
)
from shardcompute.trust.reputation import Finding
from support.swarm.fake_cluster import NOW_S, FakeCoordinator
from support.swarm.small_placements import make_model

HOUR_S = 3600.0
POLICY = PoolPolicy(
    joins_per_hour=3, per_network=2, most_on_probation=5, promoted_after=4, least_age_s=HOUR_S
)
steps = st.lists(
    st.tuples(
        st.integers(0, 12),  # which key
        st.integers(0, 3),  # from which network
        st.sampled_from([1.0, 60.0, HOUR_S, 50 * HOUR_S]),  # so much later
        st.sampled_from(["join", "passed", "failed", "withheld", "disputed"]),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(steps)
def test_limits_hold_for_any_schedule_of_joins(schedule: list[tuple[int, int, float, Finding]]) -> None:
    pool: dict[str, PoolMember] = {}
    now_s, joined_s, honest = 0.0, list[float](), dict[str, int]()
    for key, place_of_key, later_s, what in schedule:
        now_s += later_s
        node, network = f"key {key}", f"10.0.{place_of_key}.0/24"
        if what == "join":
            if not why_refused(pool, POLICY, node, network, now_s, present=pool):
                joined_s += [] if node in pool else [now_s]
                pool = admitted(pool, node, network, now_s)
        elif node in pool:
            before = pool[node]
            pool[node] = after_finding(before, POLICY, what, 1, "why", now_s)
            ends_record = what in ("withheld", "disputed")
            honest[node] = (
                0 if ends_record else honest.get(node, 0) + (what == "passed" and before.is_on_probation)
            )
        here = [each for each in pool.values() if each.standing != "expelled"]
        for each in {member.network for member in here}:
            assert sum(member.network == each for member in here) <= POLICY.per_network
        assert sum(member.is_on_probation for member in here) <= POLICY.most_on_probation
        assert sum(now_s - at_s < HOUR_S for at_s in joined_s) <= POLICY.joins_per_hour
        for id, member in pool.items():
            assert not may_audit(member)
            assert rate_of(member, POLICY, 0.01, 1.0) == (1.0 if member.standing == "probation" else 0.25)
            if member.standing == "promoted":
                assert honest[id] >= POLICY.promoted_after
                assert member.decided_s - member.admitted_s >= POLICY.least_age_s
            if member.standing == "expelled":
                assert "expelled" in why_refused(pool, POLICY, id, "elsewhere", now_s + 1e9)


def test_networks_are_those_that_one_party_has() -> None:
    assert network_of("192.0.2.7") == network_of("192.0.2.200") != network_of("192.0.3.7")
    assert network_of("::ffff:192.0.2.7") == network_of("192.0.2.7")
    assert network_of("2001:db8:1:2::3") == network_of("2001:db8:1:ffff::9") != network_of("2001:db8:2::3")
    assert network_of("a relay") == network_of("") == "unknown"


CLASSES = ("onnx-cpu-int8-a", "onnx-cpu-int8-b")
machines = st.lists(
    st.tuples(
        st.sampled_from(["token", "token", "stranger"]),
        st.integers(0, 60),
        st.sampled_from([CLASSES[0], CLASSES[0], CLASSES[1]]),
        st.sampled_from([0.5, 1.0, 3.0]),
    ),
    min_size=1,
    max_size=6,
)
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=10).map(tuple)


def cluster_of(found: list[tuple[str, int, str, float]], model: Model, policy: PoolPolicy) -> FakeCoordinator:
    coordinator = FakeCoordinator()
    coordinator.state = ClusterState(
        driver="head",
        placing=PlacementPolicy(latency_weight=0.0, machine_price=0.0, least_lifetime_s=0.0),
        pooling=policy,
    )
    for number, (kind, memory_bytes, exactness, seconds) in enumerate(found):
        node = f"{kind} {number}"
        if kind == "stranger":
            coordinator.post(happened.StrangerAdmitted(node, "10.0.0.0/24", 0.0))
        coordinator.post(
            happened.NodeJoined(
                node=node,
                name=node,
                role="worker",
                address=f"tcp://{number}",
                device="cpu",
                memory_bytes=memory_bytes,
                threads=1,
                version="1",
                incarnation=1,
                seconds_per_byte=seconds,
                exactness=exactness,
                session_namespace=number + 1,
                now_s=NOW_S,
            )
        )
    coordinator.post(happened.ModelRequested(model))
    return coordinator


def check(state: ClusterState, model: Model, stages: tuple[Assignment, ...]) -> None:
    """What holds for every layout with strangers in it."""
    most = state.pooling.layers_of(model.layer_count)
    used = {stage.node: memory_of(state, model, stage) for stage in stages}
    for stage in stages:
        if not stage.node.startswith("stranger"):
            continue
        assert not stage.ranks
        assert stage.start > 0
        assert stage.stop < model.layer_count, "no boundary layer"
        assert stage.stop - stage.start <= most, "a small share"
        wanted = state.nodes[stage.node].exactness
        checkers = [
            node
            for node in state.nodes.values()
            if node.id.startswith("token")
            and node.exactness == wanted
            and node.room_bytes - used.get(node.id, 0)
            >= memory_of(state, model, Assignment(node.id, stage.start, stage.stop))
        ]
        assert checkers, "never alone"


@settings(max_examples=80, deadline=None)
@given(machines, sizes, st.integers(1, 3), st.integers(0, 6))
def test_no_layout_gives_a_stranger_what_it_must_not_have(
    found: list[tuple[str, int, str, float]], layers: tuple[int, ...], most: int, lost: int
) -> None:
    model = make_model(layers, (3, 3))
    policy = PoolPolicy(most_layers=most, most_share=0.5)
    state = cluster_of(found, model, policy).state
    request = placement_request(state, model, NOW_S)
    placement = place(request)
    if not isinstance(placement, Placement):
        return
    check(state, model, placement.assignments)
    assert not any(each.node.startswith("stranger") for each in placement.standbys)
    # One machine less: what takes its place obeys the same.
    gone = placement.assignments[lost % len(placement.assignments)].node
    state = apply(state, happened.NodeLeft(gone, 1))
    after = placement_request(state, model, NOW_S)
    replaced = replace_stage(after, placement.assignments, (gone,))
    if isinstance(replaced, Replacement):
        check(state, model, replaced.stages)


@settings(max_examples=40, deadline=None)
@given(machines, sizes)
def test_a_cluster_at_rest_has_no_stranger_where_none_may_be(
    found: list[tuple[str, int, str, float]], layers: tuple[int, ...]
) -> None:
    model = make_model(layers, (3, 3))
    coordinator = cluster_of(found, model, PoolPolicy(most_layers=2, most_share=0.5))
    coordinator.settle()
    state = coordinator.state
    for chain in state.live_chains():
        check(state, model, chain.stages)
        assert not any(each.node.startswith("stranger") for each in chain.standbys)
        assert not chain.driver_host.startswith("stranger")
    # Those who could check are gone: strangers compute nothing then.
    for node in [each for each in state.nodes.values() if each.id.startswith("token")]:
        coordinator.post(happened.NodeLeft(node.id, node.incarnation))
    coordinator.settle()
    serving = [chain for chain in coordinator.state.live_chains() if chain.status == "ready"]
    assert not serving
