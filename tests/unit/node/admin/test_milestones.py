"""What happens in a cluster is told once, in words."""

from __future__ import annotations

import itertools

import msgspec

from shardcompute.cli.serve.story import activity, progress_lines
from shardcompute.control import events as happened
from shardcompute.control.explain import report_models
from shardcompute.control.state import Assignment, Chain, ClusterState, Loading, Move, Node, Refusal, Shard
from shardcompute.node.admin.milestones import milestones
from support.swarm.fake_cluster import H200, NOW_S, serving_cluster

EMPTY = ClusterState()
WORKER = Node(
    id="n1",
    name="attic",
    role="worker",
    address="tcp://127.0.0.1:1",
    device="cpu",
    memory_bytes=3 << 30,
    threads=2,
    version="1",
    incarnation=1,
    status="ready",
    last_seen_s=0.0,
    lease_until_s=9.0,
)
CHAIN = Chain(id="m#1", model="m", epoch=1, stages=(Assignment("n1", 0, 10),))


def told(before: ClusterState, after: ClusterState) -> list[str]:
    return [event.text for event in milestones(before, after)]


def _state(node: Node = WORKER, chain: Chain | None = None) -> ClusterState:
    return ClusterState(nodes={node.id: node}, chains={} if chain is None else {chain.id: chain})


def _with(**changes: object) -> Node:
    return msgspec.structs.replace(WORKER, **changes)


def test_nothing_happened() -> None:
    assert told(EMPTY, EMPTY) == []
    assert told(_state(), _state(_with(last_seen_s=5.0))) == []


def test_workers_come_go_and_come_back() -> None:
    joined, lost = _state(), _state(_with(status="lost", status_reason="it was silent"))
    assert told(EMPTY, joined) == ["attic joined: 2 threads, 3.0 GiB of memory"]
    assert told(joined, lost) == ["attic is lost: it was silent"]
    assert told(joined, _state(_with(status="gone", status_reason="left"))) == ["attic left"]
    assert told(lost, lost) == []
    assert told(lost, _state(_with(incarnation=2))) == ["attic is back: 2 threads, 3.0 GiB of memory"]


def test_memory_that_is_offered_again() -> None:
    less = _state(_with(memory_bytes=1 << 30, memory_reason="memory ran out"))
    assert told(less, _state()) == ["attic offers 3.0 GiB of memory again"]
    assert told(_state(), less) == [], "why is told with the layers"


def test_gpus_are_named_and_those_of_no_use_too() -> None:
    assert told(EMPTY, _state(_with(**H200))) == [
        "attic joined: NVIDIA H200, 3.0 GiB of memory",
        "attic: Old Card cannot be used, its driver is too old; update its driver",
    ]


def test_drivers_come_and_go() -> None:
    driving = _state(_with(role="driver", api_url="http://attic:8000"))
    lost = _state(_with(role="driver", status="lost", status_reason="it was silent"))
    assert told(EMPTY, driving) == ["attic joined as a driver, at http://attic:8000"]
    assert told(driving, lost) == ["the driver attic is lost: it was silent"]
    gone = _state(_with(role="driver", status="gone", status_reason="left"))
    assert told(driving, gone) == ["the driver attic left"]
    assert told(lost, driving) == ["attic is back as a driver, at http://attic:8000"]
    assert told(driving, driving) == []


def test_loads_are_told_of_in_quarters() -> None:
    def loading(fraction: float) -> ClusterState:
        return _state(_with(loading=(Loading("m#1", 0, 10, fraction),)))

    assert told(_state(), loading(0.0)) == ["attic fetches layers 0 to 9"]
    assert told(loading(0.2), loading(0.3)) == []
    assert progress_lines(loading(0.0), loading(0.2)) == []
    assert progress_lines(loading(0.2), loading(0.3)) == ["attic layers 0 to 9: 30% fetched"]
    assert progress_lines(loading(0.9), loading(1.0)) == ["attic layers 0 to 9: fetched, loading"]
    assert activity(loading(0.2)) == "attic layers 0 to 9: 20%"
    held = _state(_with(shards=(Shard("m#1", "m", 9, 10, 1),)))
    assert told(loading(1.0), held) == ["attic holds layer 9 of m"]
    assert activity(held) == ""
    refusing = _state(_with(refusals=(Refusal("m", "no memory", 1, 9.0),)))
    assert told(_state(), refusing) == ["attic could not hold m: no memory"]


def test_chains_are_told_of_when_they_change() -> None:
    def chain(**changes: object) -> ClusterState:
        return _state(chain=msgspec.structs.replace(CHAIN, **changes))

    ready = chain(status="ready")
    assert told(chain(), chain(status="loading")) == []
    assert told(chain(), ready) == ["m is served by attic (0–9)"]
    broken = chain(status="recovering", reason="attic was lost")
    assert told(ready, broken) == ["m is being repaired: attic was lost"]
    assert told(broken, chain(status="ready", epoch=2)) == ["m is served by attic (0–9)"]
    unserved = chain(status="broken", reason="no memory")
    assert told(ready, unserved) == ["m cannot be served: no memory"]
    assert told(unserved, chain(status="recovering", reason="gap filled", epoch=2)) == [
        "m can be served again and is being loaded: gap filled"
    ]


def test_a_planned_move_is_no_repair() -> None:
    cluster = serving_cluster(1000, 1000)
    (chain,) = cluster.coordinator.state.live_chains()
    states = [cluster.coordinator.state]
    cluster.coordinator.listen(states.append)
    stages = (Assignment("a", 0, 1), Assignment("b", 1, 6))
    cluster.coordinator.post(happened.ChainReshaped(chain.id, chain.epoch + 1, stages, "b is faster"))
    (line,) = told(*states[-2:])
    assert "moves" in line
    assert "b is faster" in line
    assert "repair" not in line
    assert states[-1].chains[chain.id].status == "moving"
    assert [report.status for report in report_models(states[-1], NOW_S)] == ["moving"]
    cluster.coordinator.post(happened.NodeLost("b", 1, "it was silent", NOW_S))
    assert states[-1].chains[chain.id].status == "recovering"


def test_a_repair_is_one_and_says_who_took_over() -> None:
    cluster = serving_cluster(500, 500)
    cluster.join("c", 500)
    states = [cluster.coordinator.state]
    cluster.coordinator.listen(states.append)
    cluster.coordinator.post(happened.NodeLost("a", 1, "it was silent", NOW_S))
    cluster.coordinator.settle()
    lines = [line for pair in itertools.pairwise(states) for line in told(*pair)]
    assert sum("is being repaired" in line for line in lines) == 1
    assert not any("moves" in line for line in lines)
    assert [line for line in lines if "took over" in line] == [
        "org/tiny is served by C (0–2) → B (3–5); C took over"
    ]


def test_models_come_and_go() -> None:
    cluster = serving_cluster(500, 500)
    before = cluster.coordinator.state
    cluster.drop("org/tiny")
    assert "org/tiny is no longer wanted" in told(before, cluster.coordinator.state)
    assert "org/tiny is to be served (int8, 1 chain)" in told(EMPTY, before)


def test_what_came_of_a_move_is_told_once() -> None:
    move = Move(1, "m#1", "m", "68% better", 5.0, made_epoch=2)
    before = msgspec.structs.replace(_state(chain=CHAIN), moves=(move,))
    judged = msgspec.structs.replace(move, outcome="a step takes 2 ms")
    after = msgspec.structs.replace(before, moves=(judged,))
    assert told(before, after) == ["m has moved: a step takes 2 ms"]
    assert told(after, msgspec.structs.replace(after, moves=(judged, move))) == []


def test_a_layout_that_is_kept() -> None:
    cluster = serving_cluster(500, 500)
    before = cluster.coordinator.state
    [name] = before.models
    cluster.coordinator.post(happened.LayoutKept(name, True))
    assert told(before, cluster.coordinator.state) == [
        f"the layout of {name} stays as it is, but for machines that fail"
    ]
