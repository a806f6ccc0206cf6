"""Where a chain's driver sits: decided from measured links, kept while it is good enough, explained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from shardcompute.control import PlacementPolicy, decode_event, encode_event, next_actions
from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control.driver_placement import choose_driver_placement, current_host, driver_placement_of
from shardcompute.control.drivers import kv_share, round_trip_s

from .conftest import MODEL, Cluster

FAR_S, NEAR_S = 0.2, 0.004
FAST = 1e-9
CALM = PlacementPolicy(latency_weight=0.0, min_gain=1e9, least_lifetime_s=0.0)
"""No layout is better than the first, so that only drivers move, and these at once."""
BELIEVED = 3
"""So often a link is measured alike before it counts as changed, whatever was measured before."""


@pytest.fixture
def ring(cluster: Cluster) -> Callable[..., Cluster]:
    """Three workers near each other with a stage each, and a coordinator so far away."""

    def build(far_s: float = FAR_S, near_s: float = NEAR_S, **changes: object) -> Cluster:
        cluster.state = replace(cluster.state, placing=CALM)
        for number, name in enumerate("abc", 1):
            cluster.join(name, 400, seconds_per_byte=FAST, session_namespace=number)
        measure(cluster, far_s, near_s)
        cluster.tell(happened.ModelRequested(MODEL, **changes))  # type: ignore[arg-type]
        cluster.settle()
        assert len(cluster.shape()) == 3
        return cluster

    return build


def measure(cluster: Cluster, far_s: float, near_s: float = NEAR_S, nodes: str = "abc") -> None:
    for _ in range(BELIEVED):
        for node in nodes:
            cluster.tell(happened.LinkMeasured("driver", node, far_s, 1e9))
        for a, b in ("ab", "ac", "bc"):
            cluster.tell(happened.LinkMeasured(a, b, near_s, 1e9))


def host(cluster: Cluster) -> str:
    cluster.settle()
    chain = cluster.state.chains["m#1"]
    assert current_host(chain) == chain.driver_host, "what was decided is done"
    return chain.driver_host


def reason(cluster: Cluster) -> str:
    names = {id: node.name for id, node in cluster.state.nodes.items()}
    return driver_placement_of(cluster.state, cluster.state.chains["m#1"], 0.0).told(names)


def test_a_driver_sits_where_the_ring_is_shortest(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    first, last = cluster.shape()[0][0], cluster.shape()[-1][0]
    assert host(cluster) in (first, last)
    assert reason(cluster) == f"driver on {host(cluster).upper()}: ring 6.0 ms instead of 204.0 ms"
    chain = cluster.state.chains["m#1"]
    assert round_trip_s(cluster.state, chain, host(cluster)) == pytest.approx(0.006)
    assert {each.driver for each in chain.drivers} == {"driver", host(cluster)}


def test_of_equal_hosts_the_one_nearest_to_the_coordinator_is_taken(ring: Callable[..., Cluster]) -> None:
    for nearest in (0, -1):
        cluster = ring()
        node = cluster.shape()[nearest][0]
        nearer = [happened.LinkMeasured("driver", node, 0.19, 1e9)] * BELIEVED
        cluster.tell(happened.DriverPlaced("m#1", "", ""), *nearer)
        assert host(cluster) == node


def test_a_near_coordinator_keeps_its_driver(ring: Callable[..., Cluster]) -> None:
    cluster = ring(far_s=0.004)
    assert host(cluster) == ""
    assert reason(cluster) == "driver on the coordinator: ring 8.0 ms, nowhere else clearly shorter"


def test_less_than_three_milliseconds_move_nobody(ring: Callable[..., Cluster]) -> None:
    cluster = ring(far_s=0.0049)
    assert host(cluster) == "", "8.9 ms against 6"
    measure(cluster, 0.0051)
    assert host(cluster) != "", "9.1 ms against 6"


def test_less_than_a_tenth_moves_nobody(ring: Callable[..., Cluster]) -> None:
    cluster = ring(far_s=0.055, near_s=0.1)
    assert host(cluster) == "", "155 ms against 150"
    measure(cluster, 0.07, 0.1)
    assert host(cluster) != "", "170 ms against 150"


def test_what_the_machines_compute_counts_too(cluster: Cluster, ring: Callable[..., Cluster]) -> None:
    ring(far_s=0.02)
    assert host(cluster) != ""
    for node in "abc":
        life = cluster.state.nodes[node].incarnation
        cluster.tell(happened.NodeMeasured(node=node, incarnation=life, model="m", layer_s=0.1))
    assert host(cluster) == "", "18 ms less of 600 are not worth the move"


def test_a_driver_does_not_flap(ring: Callable[..., Cluster]) -> None:
    cluster = ring(far_s=0.006)
    first_host = host(cluster)
    assert first_host != "", "10 ms against 6"
    measure(cluster, 0.0045)
    assert host(cluster) == first_host, "8.5 ms against 6: half of what made it move is enough to stay"
    measure(cluster, 0.0034)
    assert host(cluster) == "", "7.4 ms against 6 are not"
    measure(cluster, 0.0045)
    assert host(cluster) == "", "and not enough to move again"


def test_a_host_as_good_is_no_reason_to_move(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    first_host = host(cluster)
    other = ({cluster.shape()[0][0], cluster.shape()[-1][0]} - {first_host}).pop()
    cluster.tell(*[happened.LinkMeasured("driver", other, FAR_S / 2, 1e9)] * BELIEVED)
    assert host(cluster) == first_host


def test_what_was_not_measured_moves_nobody(cluster: Cluster) -> None:
    cluster.state = replace(cluster.state, placing=CALM)
    for number, name in enumerate("abc", 1):
        cluster.join(name, 400, seconds_per_byte=FAST, session_namespace=number)
    measure(cluster, FAR_S, nodes="ab")
    cluster.tell(happened.ModelRequested(MODEL))
    cluster.settle()
    nodes = [stage[0] for stage in cluster.shape()]
    if nodes[1] == "c":  # only the ends of the ring matter for the way home
        cluster.tell(happened.LinkMeasured("driver", "c", FAR_S, 1e9))
        assert host(cluster) != ""
        return
    assert host(cluster) == ""
    assert "not all links of the ring are measured" in reason(cluster)
    cluster.tell(happened.LinkMeasured("driver", "c", FAR_S, 1e9))
    assert host(cluster) != ""


def test_a_draft_model_keeps_its_driver_at_home(ring: Callable[..., Cluster]) -> None:
    cluster = ring(has_draft_model=True)
    assert host(cluster) == ""
    assert reason(cluster) == "driver on the coordinator: the draft model is there"
    cluster.tell(happened.ModelRequested(MODEL))
    assert host(cluster) != "", "it was started again without"


def test_a_driver_that_was_told_to_stay(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    assert host(cluster) != ""
    cluster.state = replace(cluster.state, placing=replace(cluster.state.placing, drivers="here"))
    assert host(cluster) == ""
    assert reason(cluster) == "driver on the coordinator: it was told to stay there"
    assert [each.driver for each in cluster.state.chains["m#1"].drivers] == ["driver"]


def test_workers_of_before_cannot_host(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    for name in "abc":
        cluster.join(name, 400, seconds_per_byte=FAST, shards=cluster.state.nodes[name].shards)
    assert host(cluster) == ""


def test_a_lost_host_is_followed_by_another(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    cluster.join("d", 400, seconds_per_byte=FAST, session_namespace=4)
    for other in "abc":
        cluster.tell(happened.LinkMeasured("d", other, NEAR_S, 1e9))
    cluster.tell(happened.LinkMeasured("d", "driver", FAR_S, 1e9))
    lost = host(cluster)
    cluster.lose(lost)
    assert host(cluster) not in ("", lost)
    assert lost not in {each.driver for each in cluster.state.chains["m#1"].drivers}


def test_a_host_in_doubt_keeps_the_driver_for_a_moment(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    first_host = host(cluster)
    node = cluster.state.nodes[first_host]
    cluster.tell(happened.NodeSuspected(first_host, node.incarnation, "no heartbeat", 0.0))
    chain = cluster.state.chains["m#1"]
    assert driver_placement_of(cluster.state, chain, 0.0).node == first_host
    cluster.tell(happened.LinkMeasured("driver", first_host, FAR_S, 1e9, is_open=False))
    assert driver_placement_of(cluster.state, chain, 0.0).node != first_host, (
        "where it cannot be reached it is of no use"
    )


def test_a_drained_host_is_released_after_its_driver_has_moved(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    cluster.join("d", 400, seconds_per_byte=FAST, session_namespace=4)
    for other in ("a", "b", "c", "driver"):
        cluster.tell(happened.LinkMeasured("d", other, NEAR_S if other != "driver" else FAR_S, 1e9))
    first_host = host(cluster)
    cluster.tell(happened.NodeDrained(first_host))
    done = [type(action) for action in cluster.settle()]
    assert done.index(to_do.DetachDriver) < done.index(to_do.ReleaseNode)
    assert host(cluster) not in ("", first_host)


def test_who_cannot_host_is_avoided_until_the_next_shape(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    first_host = host(cluster)
    failed = happened.DriverHostFailed("m#1", first_host, cluster.state.nodes[first_host].session_namespace)
    for _ in range(cluster.state.health.host_failures - 1):
        cluster.tell(failed)
    assert host(cluster) == first_host, "it is tried again"
    cluster.tell(failed)
    other = host(cluster)
    assert other not in ("", first_host)
    chain = cluster.state.chains["m#1"]
    assert {each.driver for each in chain.drivers} == {"driver", other}
    cluster.tell(happened.ChainReshaped("m#1", chain.epoch + 1, chain.stages, "again"))
    cluster.settle()
    assert cluster.state.chains["m#1"].avoided == ()


def test_stages_that_let_somebody_in_who_never_came_are_told(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    cluster.tell(happened.DriverPlaced("m#1", "b"), happened.DriverDetached("m#1", host(cluster), 1))
    cluster.tell(*[happened.DriverHostFailed("m#1", "b", 2)] * cluster.state.health.host_failures)
    detached = [action.driver for action in cluster.settle() if isinstance(action, to_do.DetachDriver)]
    assert "b" in detached


def test_a_hosts_broken_link_to_its_own_layers(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    first_host = host(cluster)
    cluster.tell(happened.LinkBroken(first_host, first_host, 0.0))
    assert not cluster.state.chains["m#1"].is_interrupted
    again = [action for action in next_actions(cluster.state, 0.0) if isinstance(action, to_do.AttachDriver)]
    assert [(action.driver, action.is_hosted) for action in again] == [(first_host, True)]


def test_home_keeps_memory_for_one_context(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    first_host, chain = host(cluster), cluster.state.chains["m#1"]
    assert (kv_share(cluster.state, chain, "driver"), kv_share(cluster.state, chain, first_host)) == (5, 5)
    large = replace(MODEL, kv_tokens=1000)
    cluster.state = replace(cluster.state, models={"m": replace(cluster.state.models["m"], model=large)})
    cluster.join("x", 0, role="driver", session_namespace=9)
    shares = [kv_share(cluster.state, chain, driver) for driver in ("driver", first_host, "x")]
    assert shares == [64, 1000 - 64 - 333, 333]


def test_hosts_of_chains_that_are_only_planned(ring: Callable[..., Cluster]) -> None:
    cluster = ring()
    planned = choose_driver_placement(cluster.state, ["a"], None)
    assert (planned.node, planned.ring_s) == ("a", 0.0)
    assert planned.home_s == pytest.approx(FAR_S)
    assert choose_driver_placement(cluster.state, ["a"], None, avoided=("a", "b", "c")).node == ""


def test_decisions_are_written_down_and_failures_are_not() -> None:
    placed = happened.DriverPlaced("m#1", "a", "why")
    failed = happened.DriverHostFailed("m#1", "a", 1)
    assert decode_event(encode_event(placed)) == placed
    assert happened.is_journalled(placed)
    assert not happened.is_journalled(failed)
    requested = happened.ModelRequested(MODEL, 1, has_draft_model=True)
    assert decode_event(encode_event(requested)) == requested


@pytest.mark.parametrize("drivers", ["auto", "here"])
def test_layers_are_placed_for_the_ring_that_there_will_be(cluster: Cluster, drivers: str) -> None:
    """Seen from afar another machine costs next to nothing; seen from the machines it doubles the way."""
    cluster.state = replace(cluster.state, placing=PlacementPolicy(drivers=drivers))  # type: ignore[arg-type]
    for number, name in enumerate("abc", 1):
        cluster.join(name, 1000, seconds_per_byte=1e-5, session_namespace=number)
    measure(cluster, FAR_S, near_s=0.006)
    cluster.tell(happened.ModelRequested(MODEL))
    cluster.settle()
    assert len(cluster.shape()) == (1 if drivers == "auto" else 3)
    assert (host(cluster) != "") == (drivers == "auto")
    assert round_trip_s(cluster.state, cluster.state.chains["m#1"], cluster.shape()[0][0]) == pytest.approx(
        0.0 if drivers == "auto" else 0.009
    )


def test_a_chain_begins_where_the_coordinator_reaches_it(
    cluster: Cluster, ring: Callable[..., Cluster]
) -> None:
    ring()
    first = cluster.shape()[0][0]
    cluster.tell(happened.LinkMeasured("driver", first, FAR_S, 1e9, is_open=False))
    cluster.settle()
    assert cluster.state.chains["m#1"].status == "ready"
    assert first not in (cluster.shape()[0][0], cluster.shape()[-1][0])
    assert host(cluster) not in ("", first), "what the coordinator cannot reach cannot host"
