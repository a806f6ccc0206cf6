"""What `plan` says of machines that could compute together: every alternative with its time, and why one is chosen."""

from __future__ import annotations

from itertools import combinations

import pytest

from shardcompute.backends.footprint import RANK_BACKENDS
from shardcompute.control import ClusterState, Model, apply, report_models
from shardcompute.control import events as happened
from shardcompute.control.placement.parallelism import AUTO, PIPELINE, Parallelism, parse_parallelism
from shardcompute.control.placement.rank_groups import check_ranks
from shardcompute.control.planning import decide
from shardcompute.control.sizes import shape_of
from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.node.admin.dry_run import plan_model
from shardcompute.node.admin.views import PlannedChain
from support.models.plain_model import LAYERS, ranked_model

MODEL = ranked_model()
GIB = 1 << 30
LAYER_S = 1 / 14 / (LAYERS + 1.3)
"""One machine says 14 tokens a second, of which the head takes as long as 1.3 layers."""


def cluster(nodes: str, rtt_s: float, backend: str = "onnx", model: Model = MODEL) -> ClusterState:
    state = ClusterState()
    for node in nodes:
        joined = happened.NodeJoined(
            node=node,
            name=node.upper(),
            role="worker",
            address=f"tcp://{node}",
            device="cpu",
            backend=backend,
            exactness=f"{backend}-1.0/float32/avx2",
            memory_bytes=4 * GIB,
            threads=2,
            version="1",
            incarnation=1,
            now_s=0.0,
            seconds_per_byte=1e-10,
        )
        measured = happened.NodeMeasured(
            node=node, incarnation=1, model=model.name, layer_s=LAYER_S, shape=shape_of(model)
        )
        for event in (joined, happened.NodeSeen(node, 1, 0.0), measured):
            state = apply(state, event)
    for a, b in combinations(sorted([*nodes, state.driver]), 2):
        state = apply(state, happened.LinkMeasured(a, b, rtt_s, 1.2e8))
    return state


def planned(state: ClusterState, parallel: Parallelism, model: Model = MODEL) -> tuple[PlannedChain, str]:
    view = plan_model(state, model, 1, 0.0, parallel, has_alternatives=True)
    (chain,) = view.chains
    return chain, view.text


def test_every_alternative_is_told_and_why_one_was_chosen() -> None:
    chain, text = planned(cluster("ab", 0.0001), AUTO)
    kinds = [each.kind for each in chain.alternatives]
    assert kinds == ["one machine", "pipeline", "tensor"]
    one, pipeline, tensor = chain.alternatives
    assert tensor.is_chosen
    assert tensor.layout == "A + B (0–21)"
    assert tensor.predicted_token_s < 0.85 * one.predicted_token_s
    assert pipeline.predicted_tokens_per_s_many > tensor.predicted_tokens_per_s_many
    assert tensor.score == max(each.score for each in chain.alternatives)
    assert chain.reason_of_choice.startswith("tensor, worth ")
    assert "more than pipeline" in chain.reason_of_choice
    assert "  A + B: layers 0 to 21 (22), each computed by all 2 (1:1, gather)" in text
    assert f"chosen: {chain.reason_of_choice}" in text
    assert "tensor: A + B (0–21): " in text


def test_ranks_are_listed_with_what_each_takes() -> None:
    chain, _ = planned(cluster("ab", 0.0001), AUTO)
    assert [(stage.name, stage.rank, stage.ranks, stage.weight) for stage in chain.stages] == [
        ("A", 0, 2, 1),
        ("B", 1, 2, 1),
    ]
    assert {stage.exchange for stage in chain.stages} == {"gather"}
    alone, _ = planned(cluster("a", 0.0001), PIPELINE)
    half, whole = chain.stages[0].parts, alone.stages[0].parts
    assert half.held_weights_bytes == pytest.approx(whole.held_weights_bytes / 2, rel=0.01)


def test_far_machines_are_a_pipeline_and_the_plan_says_what_ranks_would_do() -> None:
    chain, _ = planned(cluster("ab", 0.005), AUTO)
    one, pipeline, tensor = chain.alternatives
    assert pipeline.is_chosen
    assert tensor.predicted_token_s > 2 * one.predicted_token_s
    assert len(chain.stages) == 2


def test_four_machines_may_do_both() -> None:
    chain, _ = planned(cluster("abcd", 0.0001), parse_parallelism("tp=2,pp=2"))
    both = next(each for each in chain.alternatives if each.kind == "tensor and pipeline")
    assert both.is_chosen
    assert both.machines == 4
    assert [(stage.rank, stage.ranks) for stage in chain.stages] == [(0, 2), (1, 2)] * 2


def test_what_was_not_asked_for_is_told_to_be_better() -> None:
    chain, text = planned(cluster("ab", 0.0001), PIPELINE)
    assert not any(each.is_chosen for each in chain.alternatives if each.kind == "tensor")
    assert "less than tensor (it was not asked for: --parallel auto)" in chain.reason_of_choice
    assert chain.reason_of_choice in text


def test_too_few_machines_are_said_and_what_is_served_instead() -> None:
    chain, text = planned(cluster("ab", 0.0001), Parallelism(tp=2, pp=2))
    assert chain.is_possible
    assert "asked for: 2 ranks in each of 2 stages" in text
    assert "that cannot be had: tp=2,pp=2 needs 4 machines, 2 of one exactness class for each stage" in text


@pytest.mark.parametrize("backend", ["llamacpp", "transformers"])
def test_backends_that_compute_layers_whole_are_no_ranks(backend: str) -> None:
    assert backend not in RANK_BACKENDS
    for asked in (AUTO, Parallelism(tp=2)):
        chain, text = planned(cluster("ab", 0.0001, backend), asked)
        assert all(stage.ranks == 1 for stage in chain.stages)
        assert ("of 2 that are here 0 can be ranks" in text) is (asked.tp == 2)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ranked_model(heads=2, kv_heads=1), "heads come in 2 parts, too few for 4"),
        (ranked_model(adapters="calm"), "it has adapters beside it"),
        (ranked_model(sees=True), "it takes pictures"),
        (ranked_model(runner="transformers", tensor=None), "transformers runs it"),
        (ranked_model(is_whole=True, tensor=None), "its layers cannot be divided"),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused_with_the_reason(model: Model, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why) as raised:
        check_ranks(model, Parallelism(tp=4))
    assert "pp=3" in raised.value.hint
    for harmless in (None, AUTO, PIPELINE, Parallelism(pp=3)):
        check_ranks(model, harmless)


@pytest.mark.parametrize(
    "text",
    ["", "tp", "tp=", "tp=x", "pp=2,tp=2", "tp=2;pp=3", "tp=2:sum", "auto,tp=2", "tp=0", "pp=0", "tp=17"],
)
def test_words_that_say_nothing_are_refused_with_those_that_do(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_parallelism(text)
    assert raised.value.hint


@pytest.mark.parametrize(
    "text", ["auto", "tp=1", "tp=2", "pp=3", "tp=2,pp=3", "tp=2:reduce,pp=3", "tp=4:reduce"]
)
def test_words_are_said_back_as_they_were_meant(text: str) -> None:
    assert str(parse_parallelism(text)) == text
    assert parse_parallelism("tp=2:gather") == parse_parallelism("tp=2")


def test_who_asks_for_ranks_that_are_not_there_is_told_while_it_serves() -> None:
    state = apply(cluster("a", 0.0001), happened.ModelRequested(MODEL, parallel=Parallelism(tp=2)))
    state, _ = decide(state, 0.0)
    [report] = report_models(state, 0.0)
    assert state.live_chains()[0].members == ("a",)
    assert report.reasons[0].startswith(
        "2 ranks in each stage were asked for and cannot be had yet: tp=2 needs 2"
    )


def test_ranks_form_as_soon_as_they_are_there() -> None:
    state = apply(cluster("ab", 0.0001), happened.ModelRequested(MODEL, parallel=Parallelism(tp=2)))
    state, _ = decide(state, 0.0)
    assert state.live_chains()[0].stages[0].members == ("a", "b")
    [report] = report_models(state, 0.0)
    assert report.reasons == ()
