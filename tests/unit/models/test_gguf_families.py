from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families import (
    GGUF_ARCHITECTURES,
    HF_FAMILIES,
    LONG_FACTORS,
    from_gguf,
    from_hf_config,
    rope_factors_tensor,
)
from shardcompute.models.families.gguf_architectures import SAFETENSORS_ONLY
from shardcompute.models.layout import Layout
from shardcompute.models.spec import ModelSpec
from support.models.tiny import read_config, save_tiny
from support.models.tiny_gguf import ARCHITECTURES, Tensors, tiny_gguf

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "anything",
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.context_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
}
PER_LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
PER_LAYER += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
NAMES = [
    "token_embd.weight",
    "output_norm.weight",
    *(
        f"blk.{i}.{name}.weight"
        for i in range(2)
        for name in [
            "attn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_norm",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        ]
    ),
]


def _parse(metadata: dict[str, Any], tensors: Tensors) -> tuple[ModelSpec, Layout]:
    factors = rope_factors_tensor(tensors)
    long = tensors[LONG_FACTORS].tolist() if LONG_FACTORS in tensors else None
    return from_gguf(metadata, list(tensors), None if factors is None else tensors[factors].tolist(), long)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_spec_as_from_the_original_checkpoint(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    original, _ = from_hf_config(read_config(folder), list(load_file(folder / "model.safetensors")))
    metadata, tensors = tiny_gguf(name, folder)
    spec, _ = _parse(metadata, tensors)
    if original.latent is not None and spec.latent is not None:
        assert spec.latent.is_absorbed == ("blk.0.attn_k_b.weight" in tensors)
        spec = replace(spec, latent=replace(spec.latent, is_absorbed=False))
    for ours, theirs in zip(spec.ropes, original.ropes, strict=True):
        np.testing.assert_allclose(ours.inverse_frequencies, theirs.inverse_frequencies, rtol=1e-6)
        assert ours.amplitude == pytest.approx(theirs.amplitude)
        assert ours.long_beyond == theirs.long_beyond
        long = ours.long_frequencies or ()
        np.testing.assert_allclose(long, theirs.long_frequencies or (), rtol=1e-6)
    assert replace(spec, family=original.family, ropes=original.ropes) == original


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_place_has_its_shape(name: str, tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf(name, save_tiny(name, tmp_path))
    _, layout = _parse(metadata, tensors)
    for places in (layout.model, *layout.layers):
        for ours, place in places.items():
            shape = tensors[place.stored].shape[(place.expert is not None) :]
            if place.stored_shape is not None:
                assert shape == place.stored_shape, ours
                shape = (math.prod(shape[:-1]), shape[-1])
            rows = place.rows or (0, shape[0])
            assert (rows[1] - rows[0], *shape[1:]) == place.shape, ours


def test_rotary_rows_are_interleaved_where_the_format_says_so() -> None:
    _, layout = from_gguf(LLAMA, NAMES)
    marks = {name: place.interleaved_head_dim for name, place in layout.layers[0].items()}
    assert {name for name, mark in marks.items() if mark == 16} == {"attention.q", "attention.k"}
    renamed = {key.replace("llama", "qwen2"): value for key, value in LLAMA.items()}
    _, layout = from_gguf({**renamed, "general.architecture": "qwen2"}, NAMES)
    assert all(place.interleaved_head_dim is None for place in layout.layers[0].values())


def test_a_head_of_its_own_or_the_embedding() -> None:
    tied, layout = from_gguf(LLAMA, NAMES)
    assert tied.tied_head
    assert layout.model["head"].stored == "token_embd.weight"
    untied, layout = from_gguf(LLAMA, [*NAMES, "output.weight"])
    assert not untied.tied_head
    assert layout.model["head"].stored == "output.weight"


def test_the_vocabulary_is_the_token_list_or_what_the_file_says() -> None:
    assert from_gguf(LLAMA, NAMES)[0].vocab_size == 3
    silent = {key: value for key, value in LLAMA.items() if not key.startswith("tokenizer")}
    assert from_gguf({**silent, "llama.vocab_size": 77}, NAMES)[0].vocab_size == 77
    with pytest.raises(CorruptModelError, match=r"llama\.vocab_size"):
        from_gguf(silent, NAMES)


def test_counts_may_be_written_per_layer_if_layers_agree() -> None:
    spec, _ = from_gguf({**LLAMA, "llama.attention.head_count_kv": [2, 2]}, NAMES)
    assert spec.kv_heads == 2
    with pytest.raises(UnsupportedModelError, match="head_count_kv"):
        from_gguf({**LLAMA, "llama.attention.head_count_kv": [2, 4]}, NAMES)


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"),
    [("gemma2", 2, 16**-0.5), ("gemma2", 46, 32**-0.5), ("gemma3", 2, 16**-0.5), ("gemma3", 62, 32**-0.5)],
)
def test_the_largest_gemmas_scale_attention_otherwise(architecture: str, layers: int, scale: float) -> None:
    metadata = {key.replace("llama", architecture): value for key, value in LLAMA.items()} | {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.embedding_length": 128,
        f"{architecture}.attention.key_length": 16,
    }
    per_layer = [*PER_LAYER, "post_attention_norm", "post_ffw_norm"]
    if architecture == "gemma3":
        per_layer += ["attn_q_norm", "attn_k_norm"]
    names = NAMES[:2] + [f"blk.{i}.{name}.weight" for i in range(layers) for name in per_layer]
    assert from_gguf(metadata, names)[0].attention_scale == pytest.approx(scale)


def test_gemma3_slides_in_five_of_six_layers(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("gemma3", save_tiny("gemma3", tmp_path))
    del metadata["gemma3.attention.sliding_window_pattern"]
    spec, _ = from_gguf(metadata, list(tensors))
    assert [layer.rope for layer in spec.layers] == [1, 1, 1]
    metadata["gemma3.attention.sliding_window_pattern"] = [False, True, False]
    spec, _ = from_gguf(metadata, list(tensors))
    assert [layer.window for layer in spec.layers] == [None, 5, None]


def test_experts_of_older_files_lie_one_by_one(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("mixtral", save_tiny("mixtral", tmp_path))
    names = [name for name in tensors if "_exps" not in name]
    names += [
        f"blk.{i}.ffn_{part}.{e}.weight"
        for i in range(3)
        for part in ("gate", "up", "down")
        for e in range(4)
    ]
    _, layout = from_gguf(metadata, names)
    assert layout.layers[2]["experts.3.down"].stored == "blk.2.ffn_down.3.weight"


def test_factors_in_the_file_must_be_given() -> None:
    assert rope_factors_tensor(NAMES) is None
    names = [*NAMES, "rope_freqs.weight"]
    assert rope_factors_tensor(names) == "rope_freqs.weight"
    with pytest.raises(CorruptModelError, match="rope_freqs"):
        from_gguf(LLAMA, names)
    with pytest.raises(CorruptModelError, match="rope factors"):
        from_gguf(LLAMA, names, [1.0] * 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "falcon"}, "'falcon'"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale"),
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.attention.value_length": 32}, "value_length"),
        ({"llama.attention.causal": False}, "causal"),
        ({"llama.rope.scaling.type": "dynamic"}, "dynamic"),
    ],
)
def test_what_would_run_wrongly_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        from_gguf({**LLAMA, **changes}, NAMES)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"general.architecture": None}, "general.architecture"),
        ({"llama.block_count": -1}, "block_count"),
        ({"llama.block_count": 1000}, "block_count"),
        ({"llama.embedding_length": "64"}, "embedding_length"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv"),
        ({"llama.attention.key_length": 15}, "key_length"),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "layer_norm_rms_epsilon"),
        ({"llama.context_length": 10**12}, "context_length"),
        ({"llama.block_count": 3}, r"blk\.2"),
        ({"llama.rope.scaling.type": "longrope"}, "rope_factors_short"),
    ],
)
def test_what_cannot_be_true_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CorruptModelError, match=field):
        from_gguf({**LLAMA, **changes}, NAMES)


def test_a_tensor_that_the_architecture_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q_norm"):
        from_gguf(LLAMA, [*NAMES, "blk.0.attn_q_norm.weight"])


@pytest.mark.parametrize(("architecture", "family"), SAFETENSORS_ONLY.items())
def test_families_without_a_gguf_reader_are_sent_to_their_safetensors(architecture: str, family: str) -> None:
    assert family in HF_FAMILIES
    assert architecture not in GGUF_ARCHITECTURES
    with pytest.raises(UnsupportedModelError, match=repr(architecture)) as caught:
        from_gguf({"general.architecture": architecture}, ["x"])
    assert f"safetensors, of the family {family}" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention.kv_lora_rank": 10**9}, "kv_lora_rank"),
        ({"attention.kv_lora_rank": None}, "kv_lora_rank"),
        ({"attention.q_lora_rank": -1}, "q_lora_rank"),
        ({"rope.dimension_count": 7}, "dimension_count"),
        ({"rope.dimension_count": None}, "dimension_count"),
        ({"attention.key_length": 24}, "key_length"),
        ({"attention.key_length_mla": 8}, "dimension_count"),
        ({"attention.value_length_mla": 0}, "value_length_mla"),
        ({"attention.head_count": 10**9}, "head_count"),
        ({"expert_count": 10**6}, "expert_count"),
        ({"expert_used_count": 9}, "expert_used_count"),
        ({"expert_group_count": 3}, "expert_group_count"),
        ({"expert_group_count": 8}, "expert_group_count"),
        ({"expert_group_used_count": 1}, "expert_group_used_count"),
        ({"leading_dense_block_count": 2}, "leading_dense_block_count"),
        ({"rope.scaling.yarn_log_multiplier": float("inf")}, "yarn_log_multiplier"),
    ],
)
def test_latent_sizes_and_groups_that_cannot_be_true(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    metadata, tensors = tiny_gguf("deepseek-v3", save_tiny("deepseek-v3", tmp_path))
    from_gguf(metadata, list(tensors))
    changed = {f"deepseek2.{key}": value for key, value in changes.items()}
    with pytest.raises(CorruptModelError, match=field):
        from_gguf(metadata | changed, list(tensors))


def test_weights_of_softmax_scores_divided_by_their_sum_are_refused_of_deepseek(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("deepseek-v2", save_tiny("deepseek-v2", tmp_path))
    with pytest.raises(UnsupportedModelError, match="expert_weights_norm"):
        from_gguf(metadata | {"deepseek2.expert_weights_norm": True}, list(tensors))


@pytest.mark.parametrize(("step", "fits"), [(2, True), (1, False), (3, False), (0, False), (10**9, False)])
def test_llama4_has_experts_where_its_step_says(step: int, fits: bool, tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("llama4-scout", save_tiny("llama4-scout", tmp_path))
    metadata["llama4.interleave_moe_layer_step"] = step
    if fits:
        spec, _ = _parse(metadata, tensors)
        assert spec.qk_norm == "unit"
        metadata["llama4.expert_count"] = 128
        assert _parse(metadata, tensors)[0].qk_norm == "none"
    else:
        with pytest.raises(CorruptModelError, match="interleave_moe_layer_step"):
            _parse(metadata, tensors)
