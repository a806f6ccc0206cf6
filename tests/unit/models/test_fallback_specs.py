"""Checkpoints without a family of ours: which tensors belong where, and what is told of their sizes."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families import from_fallback_config, is_fallback, why_whole
from shardcompute.models.spec import Stage

CONFIG: dict[str, Any] = {
    "model_type": "novel",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def shapes(layers: int = 3, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed.weight": (100, 8), "model.norm.weight": (8,)}
    for layer in range(layers):
        found[f"model.layers.{layer}.mix.weight"] = (8, 8)
        found |= {f"model.layers.{layer}.experts.{expert}.weight": (16, 8) for expert in range(5)}
    return found | more


def names(stored: dict[str, tuple[int, ...]], stage: Stage, **changes: Any) -> set[str]:
    _, layout = from_fallback_config({**CONFIG, **changes}, stored)
    return {place.stored for place in layout.stage_places(stage)}


def test_stages_have_their_layers_and_ends_and_what_belongs_to_none() -> None:
    stored = shapes(**{"lm_head.weight": (100, 8)})
    first, middle, last = (names(stored, Stage(i, i + 1, 3)) for i in range(3))
    assert {name for name in first if ".layers." not in name} == {"model.embed.weight", "model.norm.weight"}
    assert {name for name in middle if ".layers." not in name} == {"model.norm.weight"}
    assert {name for name in last if ".layers." not in name} == {"lm_head.weight", "model.norm.weight"}
    assert first | middle | last == set(stored)
    assert all(".layers.1." in name for name in middle if ".layers." in name)


def test_without_a_head_the_last_stage_reads_the_embedding() -> None:
    spec, _ = from_fallback_config(CONFIG, shapes())
    assert spec.tied_head
    assert is_fallback(spec)
    assert "model.embed.weight" in names(shapes(), Stage(2, 3, 3))


def test_encoders_of_images_and_layers_that_predict_ahead_stay_out() -> None:
    stored = shapes(4, **{"vision.layers.0.w": (8, 8), "vision.layers.1.w": (8, 8)})
    read = names(stored, Stage(0, 3, 3), num_nextn_predict_layers=1)
    assert not any(name.startswith(("vision", "model.layers.3")) for name in read)


@pytest.mark.parametrize(
    ("changes", "stored", "error"),
    [
        ({"num_hidden_layers": 10**9}, shapes(), CorruptModelError),
        ({"num_hidden_layers": 4}, shapes(), UnsupportedModelError),
        ({"num_hidden_layers": 2}, shapes(), UnsupportedModelError),
        ({"vocab_size": -1}, shapes(), CorruptModelError),
        ({"hidden_size": True}, shapes(), CorruptModelError),
        ({"vocab_size": 101}, shapes(), UnsupportedModelError),
        ({"model_type": ""}, shapes(), UnsupportedModelError),
        ({}, shapes(**{"model.wide": (99, 1 << 20)}), UnsupportedModelError),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, Any], stored: dict[str, tuple[int, ...]], error: type[Exception]
) -> None:
    with pytest.raises(error):
        from_fallback_config({**CONFIG, **changes}, stored)


def test_recurrent_states_are_counted() -> None:
    plain, _ = from_fallback_config(CONFIG, shapes())
    assert plain.state_bytes == 0
    mamba, _ = from_fallback_config({**CONFIG, "state_size": 16, "expand": 2, "conv_kernel": 4}, shapes())
    assert mamba.state_bytes >= 4 * (2 * 8 * 16 + 2 * 8 * 4)


def test_shared_layers_need_one_machine() -> None:
    assert not why_whole(CONFIG)
    assert why_whole({**CONFIG, "num_kv_shared_layers": 2})
    assert why_whole({**CONFIG, "text_config": {"altup_num_inputs": 4}})
    assert not why_whole({**CONFIG, "num_kv_shared_layers": 0})
