from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families import HF_FALLBACKS, HF_FAMILIES, from_hf_config
from shardcompute.models.layout import TensorPlace
from shardcompute.models.spec import Layer, ModelSpec
from shardcompute.models.tensor_share import cut_of, split_tensors, tensor_cuts
from support.models.tiny import FAMILIES, tiny_names

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
NEEDED: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 32},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "glm4_moe": {"num_nextn_predict_layers": 0},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
}
"""What a family's class in transformers has no default for, or one that we do not run."""


def _config(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **changes}


_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Families whose code `transformers` has under another name."""


def _loaded(config: dict[str, Any]) -> Any:
    config = {**config, "model_type": _SAME_AS.get(config["model_type"], config["model_type"])}
    return transformers.AutoConfig.for_model(**copy.deepcopy(config))


def _spec(config: dict[str, Any]) -> ModelSpec:
    shaping = {name: value for name, value in config.items() if not name.startswith("rope_")}
    return from_hf_config(config, tiny_names(_loaded(shaping)))[0]


@pytest.mark.parametrize("family", [family for family in HF_FAMILIES if "_vl_" not in family])
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A file with sizes only means the same as one with every field that transformers fills in."""
    sparse = _config(family, **NEEDED.get(family, {}))
    full = _loaded(sparse)
    names = tiny_names(full)
    spec, layout = from_hf_config(sparse, names)
    assert (spec, layout) == from_hf_config({**full.to_dict(), "model_type": family}, names)
    assert spec.norm_eps == getattr(full, HF_FAMILIES[family].norm_eps_field)
    if spec.latent is None:
        assert spec.kv_heads == full.num_key_value_heads


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stored_tensor_of_the_right_shape_for_every_place(name: str) -> None:
    config = FAMILIES[name]()
    shapes = _shapes(config)
    _, layout = from_hf_config(config.to_dict(), list(shapes))
    for places in (layout.model, *layout.layers):
        for ours, place in places.items():
            assert _placed(place, shapes[place.stored]) == place.shape, ours


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        tensors = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _placed(place: TensorPlace, stored: tuple[int, ...]) -> tuple[int, ...]:
    shape = list(stored if place.expert is None else stored[1:])
    if place.is_transposed:
        shape.reverse()
    if place.rows is not None:
        assert place.rows[1] <= shape[0]
        shape[0] = place.rows[1] - place.rows[0]
    if place.every is not None:
        shape[0] //= place.every[1]
    return tuple(shape)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_type": "llama3",
}
LONGROPE = {"type": "su", "short_factor": [1.5] * 8, "long_factor": [2.5] * 8}


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        ),
        (
            "qwen2",
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        ),
        (
            "gemma3_text",
            {
                "rope_theta": 2e6,
                "rope_local_base_freq": 2e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 4,
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
                "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
            },
        ),
        (
            "phi3",
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 256},
            {
                "rope_parameters": {**LONGROPE, "rope_type": "longrope", "rope_theta": 1e4},
                "original_max_position_embeddings": 256,
            },
        ),
        ("qwen3_moe", {"num_experts": 4}, {"num_local_experts": 4}),
    ],
)
def test_old_and_new_ways_to_write_it_mean_the_same(
    family: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert _spec(_config(family, **old)) == _spec(_config(family, **new)) != _spec(_config(family))


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("llama", {}, "--------"),
        ("mistral", {"sliding_window": 7}, "77777777"),
        ("mistral", {"sliding_window": None}, "--------"),
        ("qwen2", {"sliding_window": 7, "max_window_layers": 2}, "--------"),
        ("qwen2", {"sliding_window": 7, "max_window_layers": 5, "use_sliding_window": True}, "-----777"),
        ("gemma2", {"sliding_window": 7}, "7-7-7-7-"),
        ("gemma3_text", {"sliding_window": 7}, "77777-77"),
        ("gpt_oss", {"sliding_window": 7}, "7-7-7-7-"),
        ("smollm3", {}, "---o---o"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1, 0, 1, 0]}, "-o-o-o-o"),
    ],
)
def test_layers(family: str, changes: dict[str, Any], layers: str) -> None:
    spec = _spec(_config(family, **changes))
    assert "".join(map(_letter, spec.layers)) == layers


def _letter(layer: Layer) -> str:
    return "o" if layer.rope is None else str(layer.window or "-")


def test_gemma3_turns_sliding_layers_by_a_rotation_of_their_own() -> None:
    spec = _spec(_config("gemma3_text"))
    assert [layer.rope for layer in spec.layers] == [1, 1, 1, 1, 1, 0, 1, 1]
    assert spec.ropes[0].inverse_frequencies[1] < spec.ropes[1].inverse_frequencies[1]
    assert spec.attention_scale == pytest.approx(256**-0.5)
    assert spec.embedding_scale == pytest.approx(512**0.5)


def test_qwen3_moe_mixes_dense_and_sparse_layers() -> None:
    spec = _spec(_config("qwen3_moe", num_experts=4, mlp_only_layers=[3], decoder_sparse_step=2))
    assert [layer.is_sparse for layer in spec.layers] == [False, True, False, False, False, True, False, True]
    assert spec.experts is not None
    assert spec.experts.routing.weights_over == "all"


@pytest.mark.parametrize(
    ("rename", "place"),
    [
        (
            lambda name: name,
            TensorPlace("mlp.experts.gate_up_proj", (256, 512), rows=(256, 512), expert=2),
        ),
        (
            lambda name: name.replace("mlp", "block_sparse_moe"),
            TensorPlace("block_sparse_moe.experts.gate_up_proj", (256, 512), rows=(256, 512), expert=2),
        ),
    ],
)
def test_stacked_experts(rename: Callable[[str], str], place: TensorPlace) -> None:
    config = _config("mixtral", num_local_experts=4)
    names = [rename(name) for name in tiny_names(_loaded(config))]
    _, layout = from_hf_config(config, names)
    found = layout.layers[5]["experts.2.up"]
    assert found.stored == f"model.layers.5.{place.stored}"
    assert (found.shape, found.rows, found.expert) == (place.shape, place.rows, place.expert)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("mixtral", ("block_sparse_moe", "w1", "w3", "w2")),
        ("qwen3_moe", ("mlp", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_stored_one_by_one(family: str, parts: tuple[str, ...]) -> None:
    config = _config(family, num_local_experts=3, num_experts=3, num_experts_per_tok=2)
    block, gate, up, down = parts
    names = [n.replace("mlp", block) for n in tiny_names(_loaded(config)) if ".experts." not in n]
    for layer in range(8):
        prefix = f"model.layers.{layer}.{block}.experts"
        names += [f"{prefix}.{e}.{part}.weight" for e in range(3) for part in (gate, up, down)]
    _, layout = from_hf_config(config, names)
    assert layout.layers[7]["experts.1.up"].stored == f"model.layers.7.{block}.experts.1.{up}.weight"
    assert layout.layers[0]["mlp.router"].stored == f"model.layers.0.{block}.gate.weight"


def test_gpt_oss_experts_lie_transposed_and_interleaved() -> None:
    config = _config("gpt_oss", num_local_experts=4)
    _, layout = from_hf_config(config, tiny_names(_loaded(config)))
    up = layout.layers[0]["experts.3.up"]
    assert (up.expert, up.every, up.is_transposed) == (3, (1, 2), True)
    bias = layout.layers[0]["experts.3.up.bias"]
    assert (bias.expert, bias.every, bias.is_transposed) == (3, (1, 2), False)


def test_ranks_cut_queries_where_they_cut_keys() -> None:
    config = _config("llama", num_key_value_heads=8)
    spec, layout = from_hf_config(config, tiny_names(_loaded(config)))
    layer = layout.layers[0]
    split = split_tensors(spec, [1.0, 1.0, 1.0])
    stops = []
    for share in split.shares:
        cuts = tensor_cuts(spec, share, split.exchange)
        q, k, out = (cut_of(cuts, f"attention.{name}") for name in ("q", "k", "out"))
        assert q.rows is not None
        assert k.rows is not None
        assert q.rows == out.columns
        assert q.columns is k.columns is out.rows is None
        assert [edge * 8 / layer["attention.q"].shape[0] for edge in q.rows] == [
            edge * 8 / layer["attention.k"].shape[0] for edge in k.rows
        ]
        stops.append(k.rows[1] * 8 // layer["attention.k"].shape[0])
    assert stops == [3, 6, 8]


def test_a_tied_head_is_the_embedding_whether_stored_again_or_not() -> None:
    config = _config("qwen2", num_key_value_heads=4, tie_word_embeddings=True)
    names = set(tiny_names(_loaded(config)))
    for stored in (names, names - {"lm_head.weight"}):
        spec, layout = from_hf_config(config, stored)
        assert spec.tied_head
        assert layout.model["head"].stored == "model.embed_tokens.weight"


def test_frequencies_stored_by_old_files_are_ignored() -> None:
    config = _config("llama")
    names = [*tiny_names(_loaded(config)), "model.layers.3.self_attn.rotary_emb.inv_freq"]
    assert from_hf_config(config, names) == from_hf_config(config, names[:-1])


def test_fields_of_trainers_and_tools_are_let_through() -> None:
    config = _config("llama")
    extra = {
        "architectures": ["LlamaForCausalLM"],
        "is_llama_config": True,
        "initializer_range": 0.04,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"dtype": "q4"},
        "use_cache": True,
    }
    names = tiny_names(_loaded(config))
    assert from_hf_config({**config, **extra}, names) == from_hf_config(config, names)


def test_a_missing_tensor_is_named() -> None:
    config = _config("llama")
    names = set(tiny_names(_loaded(config))) - {"model.layers.3.mlp.up_proj.weight"}
    with pytest.raises(CorruptModelError, match=r"lacks model\.layers\.3\.mlp\.up_proj\.weight"):
        from_hf_config(config, names)


def test_a_tensor_that_the_family_does_not_have_is_refused() -> None:
    config = _config("llama")
    names = [*tiny_names(_loaded(config)), "model.layers.0.self_attn.q_norm.weight"]
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.q_norm"):
        from_hf_config(config, names)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_type = 'mrope'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier = 0.5"),
        ("llama", {"sliding_window": 128}, "sliding_window = 128"),
        ("mistral", {"attention_bias": True}, "attention_bias = True"),
        ("mistral", {"layer_types": ["full_attention"] * 8}, "layer_types"),
        ("qwen2", {"layer_types": ["linear_attention"] * 8}, "linear_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha"),
    ],
)
def test_what_would_run_wrongly_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    names = tiny_names(_loaded(_config(family)))
    with pytest.raises(UnsupportedModelError, match=message):
        from_hf_config(_config(family, **changes), names)


def test_experts_that_are_there_twice_are_refused() -> None:
    config = _config("gpt_oss", num_local_experts=4)
    names = [*tiny_names(_loaded(config)), "model.layers.0.mlp.experts.gate_up_proj_blocks"]
    with pytest.raises(UnsupportedModelError, match="gate_up_proj_blocks"):
        from_hf_config(config, names)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": "512"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 900}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_what_cannot_be_true_is_named(changes: dict[str, Any], field: str) -> None:
    names = tiny_names(_loaded(_config("llama")))
    with pytest.raises(CorruptModelError, match=field):
        from_hf_config(_config("llama", **changes), names)


def test_more_experts_than_could_be_held_are_not_even_listed() -> None:
    config = _config("mixtral", num_hidden_layers=100, num_local_experts=1024)
    with pytest.raises(CorruptModelError, match="num_local_experts"):
        from_hf_config(config, [str(i) for i in range(100)])


@pytest.mark.parametrize(("name", "near"), [("qwen3_text", "qwen3"), ("gemma", "gemma2"), ("plamo", "")])
def test_an_unknown_family_is_named_with_the_nearest_and_the_fallback(name: str, near: str) -> None:
    with pytest.raises(UnsupportedModelError, match=repr(name)) as caught:
        from_hf_config(_config(name), ["x"])
    assert near in caught.value.hint
    assert "run through transformers" in caught.value.hint


def test_a_model_that_sees_in_a_way_we_do_not_know_is_refused_as_such() -> None:
    config = {"model_type": "llava", "text_config": _config("llama"), "vision_config": {"a": 1}}
    with pytest.raises(UnsupportedModelError, match="more than text"):
        from_hf_config(config, ["x"])


def test_the_text_part_of_a_model_that_sees_is_read_without_the_rest() -> None:
    """Also as older files have it, flat; a stored head of its own is one, whatever the fields say."""
    inner = _config("qwen2_5_vl_text", tie_word_embeddings=True, num_key_value_heads=8)
    names = tiny_names(_loaded(_config("qwen2", num_key_value_heads=8)))
    seeing = [*names, "visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.bias"]
    config = {"model_type": "qwen2_5_vl", "text_config": inner, "vision_config": {"depth": 1}}
    spec, layout = from_hf_config(config, seeing)
    assert (spec.family, spec.tied_head) == ("qwen2_5_vl_text", False)
    flat = {**inner, "model_type": "qwen2_5_vl", "vision_config": {"depth": 1}, "image_token_id": 7}
    assert from_hf_config(flat, seeing) == (spec, layout)
    with pytest.raises(UnsupportedModelError, match="visual"):
        from_hf_config({**inner, "model_type": "qwen2", "max_window_layers": 28}, seeing)


@pytest.mark.parametrize("family", HF_FALLBACKS)
def test_what_only_transformers_runs_is_refused_with_the_reason_and_what_runs_it(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"a {family} model .*, which our own backends") as caught:
        from_hf_config(_config(family), ["x"])
    assert "transformers" in caught.value.hint
    assert family not in HF_FAMILIES


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": ["gemma3"]}, "model_type"),
        ({"model_type": "gemma3", "text_config": {}}, "num_hidden_layers"),
        ({"model_type": "gemma3", "text_config": {"model_type": 7}}, "model_type"),
        (_config("glm4_moe", n_routed_experts=0), "n_routed_experts"),
        (_config("glm4_moe", n_routed_experts=4, n_group=3), "n_group"),
        (_config("dots1"), "n_routed_experts"),
        (_config("hunyuan_v1_moe", head_dim=16, num_experts=1 << 20), "num_experts"),
        (_config("llama4_text", no_rope_layers=[1, 0]), "no_rope_layers"),
        (_config("minimax_m2", head_dim=16, rotary_dim=17), "rotary_dim"),
        (_config("granitemoehybrid", layer_types=["attention"]), "layer_types"),
        (_config("ernie4_5_moe", moe_k=65), "moe_k"),
    ],
)
def test_what_newer_families_cannot_be_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CorruptModelError, match=named):
        from_hf_config(config, [str(i) for i in range(100)])


def test_granite_4_with_a_recurrent_state_is_refused_with_what_runs_it() -> None:
    config = _config("granitemoehybrid", layer_types=["mamba", "attention"] * 4)
    with pytest.raises(UnsupportedModelError, match="layer_types") as caught:
        from_hf_config(config, [str(i) for i in range(100)])
    assert "transformers" in caught.value.hint


def _deepseek(**changes: Any) -> dict[str, Any]:
    """As DeepSeek V3's own file has it, smaller."""
    yarn = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }
    fields = {
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rope_scaling": yarn,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "v_head_dim": 16,
    }
    return _config("deepseek_v3", **{**fields, **changes})


def _deepseek_names(config: dict[str, Any]) -> list[str]:
    return tiny_names(_loaded({name: value for name, value in config.items() if name != "rope_scaling"}))


def test_deepseek_keeps_a_compressed_row_and_stretches_scores() -> None:
    config = _deepseek()
    spec, _ = from_hf_config(config, _deepseek_names(config))
    assert (spec.kv_heads, spec.head_dim) == (1, 32 + 8)
    assert spec.kv_bytes_per_token_and_layer("float32") == 4 * (32 + 8)
    assert spec.kv_bytes_per_token_and_layer("int8") == 5 * (8 + 4)
    assert spec.attention_scale == pytest.approx(24**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert [layer.is_sparse for layer in spec.layers] == [False] + [True] * 7
    assert spec.context_length == 40 * 4096


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    config = _deepseek()
    names = _deepseek_names(config)
    further = [f"model.layers.8.{rest}" for rest in ("embed_tokens.weight", "mlp.experts.0.up_proj.weight")]
    spec, _ = from_hf_config(config, [*names, *further])
    assert spec.layer_count == 8
    with pytest.raises(UnsupportedModelError, match=r"layers\.8"):
        from_hf_config({**config, "num_nextn_predict_layers": 0}, [*names, *further])


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    config = _deepseek(n_group=1, topk_group=1)
    names = _deepseek_names(config)
    spec, layout = from_hf_config(config, names)
    kimi, kimi_layout = from_hf_config({**config, "model_type": "kimi_k2"}, names)
    assert (replace(kimi, family="deepseek_v3"), kimi_layout) == (spec, layout)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"topk_group": 1, "num_experts_per_tok": 8}, "topk_group"),
        ({"n_group": 3}, "n_group"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"n_routed_experts": 1 << 20}, "n_routed_experts"),
        ({"kv_lora_rank": 1 << 30}, "kv_lora_rank"),
    ],
)
def test_latents_that_cannot_be(changes: dict[str, Any], named: str) -> None:
    names = _deepseek_names(_deepseek())
    with pytest.raises(CorruptModelError, match=named):
        from_hf_config(_deepseek(**changes), names)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_routing_of_another_kind_is_refused(changes: dict[str, Any], named: str) -> None:
    names = _deepseek_names(_deepseek())
    with pytest.raises(UnsupportedModelError, match=named):
        from_hf_config(_deepseek(**changes), names)
