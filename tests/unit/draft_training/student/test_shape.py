"""What a student of a model looks like, and of which models there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.draft_training.student.shape import choose_layers, plan_student
from shardcompute.models.families import outline_of_config
from shardcompute.models.spec import Experts, Layer, ModelSpec, Rope
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpec]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder))) as opened:
        yield opened.spec


@pytest.mark.parametrize(
    ("count", "wanted", "chosen"),
    [
        (30, None, (0, 10, 19, 29)),
        (16, None, (0, 15)),
        (80, None, (0, 16, 32, 47, 63, 79)),
        (3, None, (0, 2)),
        (2, None, (1,)),
        (30, 3, (0, 14, 29)),
        (30, 1, (29,)),
        (30, (2, 5, 29), (2, 5, 29)),
    ],
)
def test_layers_from_the_first_to_the_last(count: int, wanted: Any, chosen: tuple[int, ...]) -> None:
    assert choose_layers(count, wanted) == chosen


@pytest.mark.parametrize(
    ("count", "wanted"), [(4, 0), (4, (2, 1)), (4, (1, 4)), (4, (-1, 2)), (4, 9), (4, (1, 1))]
)
def test_layers_that_are_not_there_are_refused(count: int, wanted: Any) -> None:
    with pytest.raises(UsageError, match="cannot begin with"):
        choose_layers(count, wanted)


@pytest.mark.parametrize(("count", "wanted"), [(4, 4), (1, None), (2, (0, 1))])
def test_a_student_is_smaller_than_its_parent(count: int, wanted: Any) -> None:
    with pytest.raises(UsageError, match="the model itself"):
        choose_layers(count, wanted)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True}, "llama"),
        ({"has_qkv_bias": True}, "qwen2"),
        ({"qk_norm": "head", "tied_head": True}, "qwen3"),
        ({"ropes": (Rope((1.0, 0.3, 0.02, 1e-3, 1e-4, 2e-5, 3e-6, 1e-6), amplitude=1.25),)}, "llama"),
        ({"ropes": (Rope(tuple(500_000.0 ** (-i / 8) for i in range(8))),)}, "llama"),
        ({"embedding_scale": 8.0, "tied_head": True, "logit_scale": 0.25, "residual_scale": 0.5}, "llama"),
        ({"layers": (Layer(window=64),) * 6}, "llama"),
    ],
)
def test_its_config_says_what_it_is(parent: ModelSpec, changes: dict[str, Any], family: str) -> None:
    shape = plan_student(replace(parent, **changes), 2)
    assert (shape.family, shape.kept) == (family, (0, 5))
    config = json.loads(json.dumps(shape.config([257], 256)))
    read, _ = outline_of_config(config)
    frequencies = pytest.approx(shape.spec.ropes[0].inverse_frequencies, rel=1e-5)
    assert read.ropes[0].inverse_frequencies == frequencies
    assert read.ropes[0].amplitude == shape.spec.ropes[0].amplitude
    assert replace(read, ropes=shape.spec.ropes) == shape.spec
    assert read.tied_head == (family == "qwen3")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"experts": Experts(4, 2, 32)}, "experts"),
        ({"norm_placement": "around"}, "norms"),
        ({"norm": "layer"}, "centred"),
        ({"activation": "gelu_tanh"}, "gelu_tanh"),
        ({"has_gate": False}, "activation"),
        ({"qk_norm": "width"}, "queries"),
        ({"logit_softcap": 30.0}, "caps"),
        ({"has_sinks": True}, "sinks"),
        ({"state_bytes": 64}, "states"),
        ({"layers": (Layer(), Layer(rope=None)) * 3}, "turn"),
        ({"ropes": (Rope((1.0, 0.1)),)}, "turn"),
        ({"has_out_bias": True}, "biases"),
        ({"has_qkv_bias": True, "qk_norm": "head"}, "biases"),
    ],
)
def test_other_models_are_refused_with_the_reason(
    parent: ModelSpec, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        plan_student(replace(parent, **changes))
    assert "draft-head" in caught.value.hint


def test_a_student_of_a_model_with_a_long_context_stays_within_the_short_one(parent: ModelSpec) -> None:
    short, long = (tuple(each for _ in range(8)) for each in (0.1, 0.01))
    rope = Rope(short, long_frequencies=long, long_beyond=128)
    spec = plan_student(replace(parent, ropes=(rope,))).spec
    assert (spec.context_length, spec.ropes) == (128, (Rope(short),))
