"""What `plan` says of how good it is: how far from the best possible, in words and as values."""

from __future__ import annotations

from itertools import combinations

import pytest

from shardcompute.control import ClusterState, Model, apply
from shardcompute.control import events as happened
from shardcompute.control.placement.parallelism import AUTO, PIPELINE, Parallelism
from shardcompute.node.admin.dry_run import plan_model
from support.models.plain_model import ranked_model

MODEL = ranked_model()
GIB = 1 << 30


def cluster(nodes: str, *, model: Model = MODEL, far: str = "") -> ClusterState:
    state = ClusterState()
    for i, node in enumerate(nodes):
        joined = happened.NodeJoined(
            node=node,
            name=node.upper(),
            role="worker",
            address=f"tcp://{node}",
            device="cpu",
            backend="onnx",
            exactness="onnx-1.0/float32/avx2",
            memory_bytes=4 * GIB,
            threads=2,
            version="1",
            incarnation=1,
            now_s=0.0,
            seconds_per_byte=(1 + 0.3 * (i % 3)) * 1e-10,
        )
        for event in (joined, happened.NodeSeen(node, 1, 0.0)):
            state = apply(state, event)
    for a, b in combinations(sorted([*nodes, state.driver]), 2):
        rtt_s = 0.04 if a in far or b in far else 0.0002
        state = apply(state, happened.LinkMeasured(a, b, rtt_s, 1.2e8))
    return state


@pytest.mark.parametrize("nodes", ["a", "ab", "abcdefghi"])
def test_a_plan_says_how_far_it_may_be_from_the_best(nodes: str) -> None:
    view = plan_model(cluster(nodes), MODEL, 1, 0.0, PIPELINE)
    (chain,) = view.chains
    assert chain.gap is not None
    assert 0 <= chain.gap < 0.1
    assert chain.most_tokens_per_s_one_stream is not None
    assert chain.most_tokens_per_s_many is not None
    assert chain.predicted_tokens_per_s_one_stream <= chain.most_tokens_per_s_one_stream
    assert chain.predicted_tokens_per_s_many <= chain.most_tokens_per_s_many
    (told,) = [line for line in view.text.splitlines() if "the best possible" in line]
    if chain.gap >= 0.0005:
        assert told.startswith(
            f"within {100 * chain.gap:.1f} % of the best possible: no layout of these machines"
        )


def test_one_machine_is_all_that_is_possible() -> None:
    view = plan_model(cluster("a"), MODEL, 1, 0.0, PIPELINE)
    (chain,) = view.chains
    assert chain.gap == pytest.approx(0, abs=0.001)
    assert "the best possible: no layout of these machines gives more than" in view.text


def test_copies_are_measured_by_what_the_others_leave() -> None:
    view = plan_model(cluster("ab", far="b"), MODEL, 2, 0.0, PIPELINE)
    first, second = view.chains
    assert {stage.node for stage in first.stages}.isdisjoint(stage.node for stage in second.stages)
    assert first.gap == pytest.approx(0, abs=0.001)
    assert second.gap == pytest.approx(0, abs=0.001)
    assert second.most_tokens_per_s_one_stream != first.most_tokens_per_s_one_stream


def test_as_many_stages_as_asked_for_are_measured_by_such_layouts() -> None:
    asked = plan_model(cluster("abc", far="bc"), MODEL, 1, 0.0, Parallelism(pp=3)).chains[0]
    free = plan_model(cluster("abc", far="bc"), MODEL, 1, 0.0, PIPELINE).chains[0]
    assert len(asked.stages) == 3
    assert asked.gap is not None
    assert asked.gap < 0.2
    assert asked.most_tokens_per_s_one_stream is not None
    assert free.most_tokens_per_s_one_stream is not None
    assert asked.most_tokens_per_s_one_stream < free.most_tokens_per_s_one_stream


def test_groups_are_said_to_be_these() -> None:
    view = plan_model(cluster("ab"), MODEL, 1, 0.0, Parallelism(tp=2))
    assert "no layout of these machines with these groups gives more" in view.text
    plain = plan_model(cluster("ab"), MODEL, 1, 0.0, AUTO)
    assert plain.chains[0].gap is not None


def test_what_does_not_fit_has_no_gap() -> None:
    view = plan_model(ClusterState(), MODEL, 1, 0.0, PIPELINE)
    assert not view.chains[0].is_possible
    assert view.chains[0].gap is None
    assert "best possible" not in view.text
