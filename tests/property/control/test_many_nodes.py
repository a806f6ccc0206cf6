"""What is done for many nodes at once is what would be done for each of them."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shardcompute.control import ClusterState, Event, apply, decode_event, encode_event, is_journalled
from shardcompute.control import events as happened
from shardcompute.control.actions import LoadShard
from shardcompute.control.planning import next_commands
from shardcompute.control.state import Assignment, Holding
from shardcompute.control.transitions.state_updates import claimed_bytes
from support.models.plain_model import plain_model

NODES = ("a", "b", "c", "d")
BEATS = st.lists(st.tuples(st.sampled_from(NODES), st.integers(1, 2), st.floats(0.0, 6.0)), max_size=12)


def joined(node: str, now_s: float) -> happened.NodeJoined:
    return happened.NodeJoined(
        node=node,
        name=node,
        role="worker",
        address=f"tcp://{node}:1",
        device="cpu",
        memory_bytes=1000,
        threads=1,
        version="0",
        incarnation=1,
        now_s=now_s,
        seconds_per_byte=1.0,
    )


def cluster(*events: Event) -> ClusterState:
    return reduce(apply, (*(joined(node, 0.1 * i) for i, node in enumerate(NODES)), *events), ClusterState())


@given(BEATS)
def test_heartbeats_together_are_heartbeats_one_by_one(beats: list[tuple[str, int, float]]) -> None:
    doubt = happened.NodeSuspected("b", 1, "no heartbeat", 1.0)
    before = cluster(doubt, happened.NodeLost("d", 1, "gone", 1.0))
    seen = tuple(happened.NodeSeen(node, life, now_s, 5) for node, life, now_s in beats)
    assert apply(before, happened.NodesSeen(seen)) == reduce(apply, seen, before)


def test_heartbeats_of_nobody_change_nothing() -> None:
    before = cluster()
    assert apply(before, happened.NodesSeen(())) is before
    assert apply(before, happened.NodesSeen((happened.NodeSeen("x", 1, 1.0),))) is before


def test_heartbeats_are_not_written_down() -> None:
    event = happened.NodesSeen((happened.NodeSeen("a", 1, 1.0),))
    assert not is_journalled(event)
    assert decode_event(encode_event(event)) == event


def test_claims_follow_the_state() -> None:
    model = plain_model()
    half = model.layer_count // 2
    first = (Assignment("a", 0, half), Assignment("b", half, model.layer_count))
    second = (Assignment("a", 0, model.layer_count),)
    wanted = cluster(happened.ModelRequested(model, 2))
    one = apply(wanted, happened.ChainPlanned("1", model.name, first))
    both = apply(one, happened.ChainPlanned("2", model.name, second))
    assert claimed_bytes(wanted, "a") == 0
    assert claimed_bytes(one, "a") > 0 < claimed_bytes(one, "b")
    assert claimed_bytes(both, "a") == claimed_bytes(one, "a") + claimed_bytes(both, "a", except_chain="1")
    assert claimed_bytes(both, "a", except_chain="2") == claimed_bytes(one, "a")
    assert claimed_bytes(wanted, "a") == 0, (
        "what was asked about another state is not answered about this one"
    )
    retired = apply(both, happened.ChainRetired("2", "enough"))
    assert claimed_bytes(retired, "a") == claimed_bytes(one, "a")


def test_of_very_many_sources_everybody_gets_some_and_not_the_same() -> None:
    model = plain_model()
    held = (Holding(model.name, 0, model.layer_count),)
    peers = [replace(joined(f"p{i:03d}", 1.0), cached=held, memory_bytes=0) for i in range(200)]
    half = model.layer_count // 2
    stages = (Assignment("a", 0, half), Assignment("b", half, model.layer_count))
    planned = happened.ChainPlanned("1", model.name, stages)
    state = cluster(*peers, happened.ModelRequested(model, 1), planned)
    loads = [each for each in next_commands(state, 1.0) if isinstance(each, LoadShard)]
    sources = [{source.node for source in load.sources} for load in loads]
    assert [load.node for load in loads] == ["a", "b"]
    assert all(8 <= len(nodes) <= 64 for nodes in sources)
    assert sources[0] != sources[1]
