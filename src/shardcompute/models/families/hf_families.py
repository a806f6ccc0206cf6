"""The families that a Hugging Face `config.json` may name, each as data.

Defaults are those of the family's own configuration class, for fields that files leave out. What no table can
say (which layers look how far, how experts are counted) is a small function per family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardcompute.core.expert_routing import Routing
from shardcompute.models.families.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYER_EXPERTS, Fields
from shardcompute.models.spec import Experts, Layer, NormPlacement

Layers = Callable[[Fields, int], tuple[Layer, ...]]
FULL, SLIDING = "full_attention", "sliding_attention"

LLAMA_NAMES: Mapping[str, str] = {
    "attention.norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.sinks": "self_attn.sinks",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.choice_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_score": "mlp.shared_expert_gate",
    "shared.gate": "mlp.shared_experts.gate_proj",
    "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}
_QWEN2_MOE_NAMES = {
    **LLAMA_NAMES,
    **{f"shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_OLMO2_NAMES = {
    **LLAMA_NAMES,
    "attention.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
_GEMMA_NAMES = {**_OLMO2_NAMES, "mlp.norm": "pre_feedforward_layernorm"}
_PHI3_NAMES = {
    **LLAMA_NAMES,
    **dict.fromkeys(("attention.q", "attention.k", "attention.v"), "self_attn.qkv_proj"),
    **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
}


@dataclass(frozen=True, slots=True)
class HfFamily:
    """What is the same for all models of a family, and how to read what is not."""

    layers: Layers
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    experts: Callable[[Fields], Experts | None] | None = None
    kv_heads: int | None = None
    """When the field is absent; None: as many as there are heads."""
    head_dim: int | None = None
    """When the field is absent; None: hidden size / heads."""
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    local_theta: float | None = None
    """Sliding layers have a rotation of their own, with this base when the field is absent."""
    rope: Mapping[str, Any] | None = None
    """Rope parameters when there are none."""
    original_context: int | None = None
    """When the field is absent; None: what the rope parameters say."""
    has_partial_rope: bool = False
    is_fused: bool = False
    """q, k and v are one matrix, gate and up another."""
    is_tied: bool = False
    norm_placement: NormPlacement = "before"
    qk_norm: Literal["none", "head", "width"] = "none"
    attention_bias: bool | Literal["qkv", "never"] = False
    """The field `attention_bias` when it is absent; or a choice that no field changes."""
    has_mlp_bias_field: bool = False
    is_gemma: bool = False
    """Norm weights lack 1, embeddings are scaled, attention is scaled by a field, logits may be capped."""
    has_sinks: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    harmless: frozenset[str] = frozenset()
    """Fields that files of this family carry and nobody's code reads."""


def _kinds(fields: Fields, count: int) -> list[bool] | None:
    """Whether each layer's attention slides, if the file says so."""
    kinds = fields.texts("layer_types")
    if kinds is None:
        return None
    if len(kinds) != count:
        raise fields.corrupt("layer_types", kinds, f"a list of {count}")
    return [fields.one_of("layer_types", kind, (FULL, SLIDING)) == SLIDING for kind in kinds]


def _window(fields: Fields, absent: int | None) -> int | None:
    return fields.optional_integer("sliding_window", absent, high=MAX_CONTEXT)


def _mixed(fields: Fields, slides: list[bool], window: int | None) -> tuple[Layer, ...]:
    if any(slides) and window is None:
        raise fields.corrupt("sliding_window", None, "a window, since some layers slide")
    return tuple(Layer(window=window if is_sliding else None) for is_sliding in slides)


def _uniform(fields: Fields, count: int, window: int | None, *, is_sparse: bool = False) -> tuple[Layer, ...]:
    """All layers alike; `layer_types` may only repeat it."""
    slides = window is not None
    kinds = _kinds(fields, count)
    if kinds is not None and kinds != [slides] * count:
        raise fields.unsupported("layer_types", kinds, "this family's layers are all alike")
    return (Layer(window=window, is_sparse=is_sparse),) * count


def full_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _uniform(fields, count, None)


def mistral_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _uniform(fields, count, _window(fields, 4096))


def phi3_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _uniform(fields, count, _window(fields, None))


def mixtral_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _uniform(fields, count, _window(fields, None), is_sparse=True)


def qwen_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    window = _window(fields, 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 28, low=0)
    kinds = _kinds(fields, count)
    if kinds is None:
        kinds = [window is not None and i >= first for i in range(count)]
    return _mixed(fields, kinds, window)


def qwen3_moe_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    window = _window(fields, 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    _uniform(fields, count, window)
    return _stepped(fields, count, window)


def qwen2_moe_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    fields.one_of("qkv_bias", fields.flag("qkv_bias", True), (True,))
    window = fields.optional_integer("sliding_window", 4096, low=0, high=MAX_CONTEXT) or None
    first_full = fields.integer("max_window_layers", 28, low=0)
    is_windowed = fields.flag("use_sliding_window", False)
    kinds = _kinds(fields, count) or [is_windowed and i % 2 == 0 and i < first_full for i in range(count)]
    layers = zip(_mixed(fields, kinds, window), _stepped(fields, count, None), strict=True)
    return tuple(Layer(window=one.window, is_sparse=other.is_sparse) for one, other in layers)


def _stepped(fields: Fields, count: int, window: int | None) -> tuple[Layer, ...]:
    """Experts in every `decoder_sparse_step`-th layer that is not named as an exception."""
    dense = set(fields.integers("mlp_only_layers") or ())
    step = fields.integer("decoder_sparse_step", 1)
    has_experts = _expert_count(fields, 128) > 0
    return tuple(
        Layer(window=window, is_sparse=has_experts and i not in dense and (i + 1) % step == 0)
        for i in range(count)
    )


def gemma2_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _mixed(fields, _kinds(fields, count) or [i % 2 == 0 for i in range(count)], _window(fields, 4096))


def gemma3_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    saved = fields.integer("_sliding_window_pattern", 6)
    pattern = fields.integer("sliding_window_pattern", saved)
    slides = _kinds(fields, count) or [(i + 1) % pattern != 0 for i in range(count)]
    layers = _mixed(fields, slides, _window(fields, 4096))
    return tuple(Layer(rope=0 if layer.window is None else 1, window=layer.window) for layer in layers)


def smollm3_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    interval = fields.integer("no_rope_layer_interval", 4)
    turns = fields.integers("no_rope_layers", high=1)
    if turns is None:
        turns = [int((i + 1) % interval != 0) for i in range(count)]
    if len(turns) < count:
        raise fields.corrupt("no_rope_layers", turns, f"a list of {count}")
    window = _window(fields, None)
    is_windowed = fields.flag("use_sliding_window", False) and window is not None
    kinds = _kinds(fields, count) or [is_windowed and not turns[i] for i in range(count)]
    layers = _mixed(fields, kinds, window if is_windowed else None)
    return tuple(
        Layer(rope=0 if turn else None, window=layer.window)
        for turn, layer in zip(turns, layers, strict=False)
    )


def gpt_oss_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    slides = _kinds(fields, count) or [i % 2 == 0 for i in range(count)]
    layers = _mixed(fields, slides, _window(fields, 128))
    return tuple(Layer(window=layer.window, is_sparse=True) for layer in layers)


def _expert_count(fields: Fields, default: int) -> int:
    """Files call it by either name; `num_local_experts` is the newer one."""
    older = fields.integer("num_experts", default, low=0, high=MAX_EXPERTS)
    count = fields.integer("num_local_experts", older, low=0, high=MAX_EXPERTS)
    layers = fields.integer("num_hidden_layers")
    if count * layers > MAX_LAYER_EXPERTS:
        raise fields.corrupt("num_local_experts", count, f"at most {MAX_LAYER_EXPERTS} experts in all layers")
    return count


def _per_token(fields: Fields, default: int, count: int) -> int:
    return fields.integer("num_experts_per_tok", min(default, count), high=count)


def mixtral_experts(fields: Fields) -> Experts:
    count = _expert_count(fields, 8)
    return Experts(count, _per_token(fields, 2, count), fields.integer("intermediate_size"))


def qwen3_moe_experts(fields: Fields) -> Experts | None:
    return _qwen_experts(fields, count=128, per_token=8, intermediate=768)


def qwen2_moe_experts(fields: Fields) -> Experts | None:
    experts = _qwen_experts(fields, count=60, per_token=4, intermediate=1408)
    shared = fields.integer("shared_expert_intermediate_size", 5632)
    return None if experts is None else replace(experts, shared_intermediate=shared, has_shared_gate=True)


def _qwen_experts(fields: Fields, *, count: int, per_token: int, intermediate: int) -> Experts | None:
    """What is given counts when the fields are absent."""
    count = _expert_count(fields, count)
    intermediate = fields.integer("moe_intermediate_size", intermediate)
    renormalises = fields.flag("norm_topk_prob", False)
    if count == 0:
        return None
    routing = Routing(weights_over="chosen" if renormalises else "all")
    return Experts(count, _per_token(fields, per_token, count), intermediate, routing)


def gpt_oss_experts(fields: Fields) -> Experts:
    count = _expert_count(fields, 128)
    gain = fields.number("swiglu_alpha", 1.702)
    if gain != 1.702:
        raise fields.unsupported("swiglu_alpha", gain, "supported: 1.702")
    return Experts(
        count,
        _per_token(fields, 4, count),
        fields.integer("intermediate_size"),
        has_bias=True,
        swiglu_limit=fields.number("swiglu_limit", 7.0, high=1e6),
    )


_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

HF_FAMILIES: Mapping[str, HfFamily] = {
    "llama": HfFamily(full_layers, has_mlp_bias_field=True),
    "mistral": HfFamily(mistral_layers, kv_heads=8, attention_bias="never"),
    "qwen2": HfFamily(qwen_layers, kv_heads=32, attention_bias="qkv"),
    "qwen3": HfFamily(qwen_layers, kv_heads=32, head_dim=128, qk_norm="head"),
    "gemma2": HfFamily(
        gemma2_layers,
        _GEMMA_NAMES,
        kv_heads=4,
        head_dim=256,
        is_tied=True,
        norm_placement="around",
        is_gemma=True,
        attention_softcap=50.0,
        logit_softcap=30.0,
        harmless=frozenset({"sliding_window_size"}),
    ),
    "gemma3_text": HfFamily(
        gemma3_layers,
        _GEMMA_NAMES,
        kv_heads=4,
        head_dim=256,
        theta=1_000_000.0,
        local_theta=10_000.0,
        is_tied=True,
        norm_placement="around",
        qk_norm="head",
        is_gemma=True,
    ),
    "phi3": HfFamily(
        phi3_layers,
        _PHI3_NAMES,
        norm_eps=1e-5,
        original_context=4096,
        has_partial_rope=True,
        is_fused=True,
        attention_bias="never",
        harmless=frozenset({"full_attn_mod", "interpolate_factor"}),
    ),
    "olmo2": HfFamily(full_layers, _OLMO2_NAMES, norm_eps=1e-5, norm_placement="after", qk_norm="width"),
    "smollm3": HfFamily(
        smollm3_layers,
        kv_heads=4,
        theta=2_000_000.0,
        is_tied=True,
        has_mlp_bias_field=True,
        harmless=frozenset({"max_window_layers"}),
    ),
    "mixtral": HfFamily(
        mixtral_layers,
        experts=mixtral_experts,
        kv_heads=8,
        norm_eps=1e-5,
        theta=1_000_000.0,
        attention_bias="never",
    ),
    "qwen3_moe": HfFamily(
        qwen3_moe_layers,
        experts=qwen3_moe_experts,
        kv_heads=4,
        qk_norm="head",
        harmless=frozenset({"max_window_layers"}),
    ),
    "qwen2_moe": HfFamily(
        qwen2_moe_layers,
        _QWEN2_MOE_NAMES,
        experts=qwen2_moe_experts,
        kv_heads=16,
        attention_bias="qkv",
    ),
    "gpt_oss": HfFamily(
        gpt_oss_layers,
        experts=gpt_oss_experts,
        kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        theta=150_000.0,
        rope=_GPT_OSS_ROPE,
        attention_bias=True,
        has_sinks=True,
        harmless=frozenset({"experts_per_token", "initial_context_length", "hidden_act"}),
    ),
}
