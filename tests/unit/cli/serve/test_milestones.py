"""What happens in a cluster is told once, in words."""

from __future__ import annotations

import msgspec

from shardcompute.cli.serve.milestones import activity, milestones
from shardcompute.control.state import Assignment, Chain, ClusterState, Loading, Node, Refusal, Shard

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


def _state(node: Node = WORKER, chain: Chain | None = None) -> ClusterState:
    return ClusterState(nodes={node.id: node}, chains={} if chain is None else {chain.id: chain})


def _with(**changes: object) -> Node:
    return msgspec.structs.replace(WORKER, **changes)


def test_nothing_happened() -> None:
    assert milestones(EMPTY, EMPTY) == []
    assert milestones(_state(), _state(_with(last_seen_s=5.0))) == []


def test_workers_come_go_and_come_back() -> None:
    joined, lost = _state(), _state(_with(status="lost", status_reason="it was silent"))
    assert milestones(EMPTY, joined) == ["attic joined: 2 threads, 3.0 GiB of memory"]
    assert milestones(joined, lost) == ["attic is lost: it was silent"]
    assert milestones(joined, _state(_with(status="gone", status_reason="left"))) == ["attic left"]
    assert milestones(lost, lost) == []
    assert milestones(lost, _state(_with(incarnation=2))) == ["attic is back: 2 threads, 3.0 GiB of memory"]


def test_drivers_come_and_go() -> None:
    driving = _state(_with(role="driver", api_url="http://attic:8000"))
    lost = _state(_with(role="driver", status="lost", status_reason="it was silent"))
    assert milestones(EMPTY, driving) == ["attic joined as a driver, at http://attic:8000"]
    assert milestones(driving, lost) == ["the driver attic is lost: it was silent"]
    gone = _state(_with(role="driver", status="gone", status_reason="left"))
    assert milestones(driving, gone) == ["the driver attic left"]
    assert milestones(lost, driving) == ["attic is back as a driver, at http://attic:8000"]
    assert milestones(driving, driving) == []


def test_loads_are_told_of_in_quarters() -> None:
    def loading(fraction: float) -> ClusterState:
        return _state(_with(loading=(Loading("m#1", 0, 10, fraction),)))

    assert milestones(_state(), loading(0.0)) == ["attic fetches layers 0 to 9"]
    assert milestones(loading(0.0), loading(0.2)) == []
    assert milestones(loading(0.2), loading(0.3)) == ["attic layers 0 to 9: 30% fetched"]
    assert milestones(loading(0.9), loading(1.0)) == ["attic layers 0 to 9: fetched, loading"]
    assert activity(loading(0.2)) == "attic layers 0 to 9: 20%"
    held = _state(_with(shards=(Shard("m#1", "m", 9, 10, 1),)))
    assert milestones(loading(1.0), held) == ["attic holds layer 9 of m"]
    assert activity(held) == ""
    refusing = _state(_with(refusals=(Refusal("m", "no memory", 1, 9.0),)))
    assert milestones(_state(), refusing) == ["attic could not load m: no memory"]


def test_chains_are_told_of_when_they_change() -> None:
    def chain(**changes: object) -> ClusterState:
        return _state(chain=msgspec.structs.replace(CHAIN, **changes))

    ready = chain(status="ready")
    assert milestones(chain(), chain(status="loading")) == []
    assert milestones(chain(), ready) == ["m is served by attic (0–9)"]
    broken = chain(status="recovering", reason="attic was lost")
    assert milestones(ready, broken) == ["m is being repaired: attic was lost"]
    assert milestones(broken, chain(status="ready", epoch=2)) == ["m is served by attic (0–9)"]
    assert milestones(ready, chain(status="broken", reason="no memory")) == ["m cannot be served: no memory"]
