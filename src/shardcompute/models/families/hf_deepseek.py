"""DeepSeek's way to write a `config.json` (V2, V3, R1, Kimi K2): latents, grouped routing, dense first layers."""

from __future__ import annotations

from collections.abc import Mapping

from shardcompute.core.expert_routing import Routing
from shardcompute.models.families.fields import (
    FALLBACK_HINT,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYER_EXPERTS,
    MAX_LAYERS,
    Fields,
)
from shardcompute.models.families.hf_family import Scales
from shardcompute.models.families.rope import check_head_dim, yarn_growth
from shardcompute.models.spec import Experts, LatentAttention, Layer

DEEPSEEK_NAMES: Mapping[str, str] = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
"""Besides Llama's. `attention.q` is `q_b_proj` where queries have latents of their own."""

HARMLESS = frozenset({"aux_loss_alpha", "ep_size", "seq_aux", "mlp_bias", "qk_head_dim", "head_dim"})
"""Losses of training, how it was spread, and what follows from other fields."""


def deepseek_v2_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _layers(fields, count, 0)


def deepseek_v3_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _layers(fields, count, 3)


def deepseek_latent(fields: Fields) -> LatentAttention:
    fields.one_of("attention_bias", fields.flag("attention_bias", False), (False,))
    rotated = fields.integer("qk_rope_head_dim", 64, high=MAX_HEAD_DIM)
    return LatentAttention(
        kv_rank=fields.integer("kv_lora_rank", 512, high=MAX_HEAD_DIM),
        plain=fields.integer("qk_nope_head_dim", 128, high=MAX_HEAD_DIM),
        rotated=check_head_dim(fields, "qk_rope_head_dim", rotated),
        value=fields.integer("v_head_dim", 128, high=MAX_HEAD_DIM),
        q_rank=fields.optional_integer("q_lora_rank", 1536),
        is_interleaved=fields.flag("rope_interleave", True),
    )


def latent_heads(fields: Fields, latent: LatentAttention) -> tuple[int, int, int]:
    """Heads, key heads and the width of what is kept. What a file says of key heads counts for nothing: each head has
    a map of its own from latents to keys."""
    fields.optional_integer("num_key_value_heads", high=MAX_HEAD_DIM)
    return fields.integer("num_attention_heads", high=MAX_HEAD_DIM), 1, latent.kv_rank + latent.rotated


def deepseek_scales(fields: Fields, hidden: int, head_dim: int) -> Scales:
    return Scales(_attention_scale(fields, deepseek_latent(fields)))


def _attention_scale(fields: Fields, latent: LatentAttention) -> float:
    """YaRN stretches scores where it has a `mscale_all_dim`, which the rotation's amplitude leaves out."""
    scale = float((latent.plain + latent.rotated) ** -0.5)
    parameters = fields.child("rope_scaling") or fields.child("rope_parameters")
    if parameters is None or parameters.text("rope_type", parameters.text("type", "default")) == "default":
        return scale
    growth = parameters.optional_number("mscale_all_dim", low=-1e-9, high=1e6)
    return scale * yarn_growth(parameters.number("factor", high=1e6), growth) ** 2 if growth else scale


def deepseek_v2_experts(fields: Fields) -> Experts:
    """Softmax scores; groups are judged by their best expert."""
    fields.one_of("scoring_func", fields.text("scoring_func", "softmax"), ("softmax",))
    # Its own code and `transformers` disagree about what the field does besides.
    fields.one_of("norm_topk_prob", fields.flag("norm_topk_prob", False), (False,))
    method = fields.one_of(
        "topk_method", fields.text("topk_method", "greedy"), ("greedy", "group_limited_greedy")
    )
    count, per_token = _counts(fields, 64, 6)
    groups, chosen = _groups(fields, count, per_token, (1, 1))
    if method == "greedy":
        groups = chosen = 1
    scale = fields.number("routed_scaling_factor", 1.0, high=1e6)
    routing = Routing(weights_over="all", groups=groups, chosen_groups=chosen, scale=scale)
    return _experts(fields, count, per_token, routing, intermediate=1407, shared=2)


def deepseek_v3_experts(fields: Fields) -> Experts:
    """Sigmoid scores with a bias for the choice; groups are judged by their two best experts."""
    fields.one_of("scoring_func", fields.text("scoring_func", "sigmoid"), ("sigmoid",))
    fields.one_of("topk_method", fields.text("topk_method", "noaux_tc"), ("noaux_tc",))
    count, per_token = _counts(fields, 256, 8)
    groups, chosen = _groups(fields, count, per_token, (8, 4))
    routing = Routing(
        "sigmoid",
        "chosen" if fields.flag("norm_topk_prob", True) else "all",
        has_choice_bias=True,
        groups=groups,
        chosen_groups=chosen,
        group_by="best_two",
        scale=fields.number("routed_scaling_factor", 2.5, high=1e6),
    )
    return _experts(fields, count, per_token, routing, intermediate=2048, shared=1)


def _layers(fields: Fields, count: int, dense: int) -> tuple[Layer, ...]:
    """Experts from `first_k_dense_replace` on, in every `moe_layer_freq`-th layer."""
    first = fields.integer("first_k_dense_replace", dense, low=0, high=MAX_LAYERS)
    step = fields.integer("moe_layer_freq", 1, high=MAX_LAYERS)
    return tuple(Layer(is_sparse=i >= first and i % step == 0) for i in range(count))


def _counts(fields: Fields, count: int, per_token: int) -> tuple[int, int]:
    count = fields.integer("n_routed_experts", count, high=MAX_EXPERTS)
    layers = fields.integer("num_hidden_layers")
    if count * layers > MAX_LAYER_EXPERTS:
        raise fields.corrupt("n_routed_experts", count, f"at most {MAX_LAYER_EXPERTS} experts in all layers")
    return count, fields.integer("num_experts_per_tok", min(per_token, count), high=count)


def _groups(fields: Fields, count: int, per_token: int, absent: tuple[int, int]) -> tuple[int, int]:
    groups = fields.integer("n_group", absent[0], high=count)
    chosen = fields.integer("topk_group", min(absent[1], groups), high=groups)
    if count % groups:
        raise fields.corrupt("n_group", groups, f"a divisor of n_routed_experts ({count})")
    if chosen * (count // groups) < per_token:
        raise fields.corrupt("topk_group", chosen, f"groups that hold num_experts_per_tok ({per_token})")
    if groups > 1 and count // groups < 2:
        raise fields.unsupported("n_group", groups, f"supported: groups of two or more; {FALLBACK_HINT}")
    return groups, chosen


def _experts(
    fields: Fields, count: int, per_token: int, routing: Routing, *, intermediate: int, shared: int
) -> Experts:
    width = fields.integer("moe_intermediate_size", intermediate)
    shared_count = fields.optional_integer("n_shared_experts", shared, low=0, high=MAX_EXPERTS) or 0
    return Experts(count, per_token, width, routing, shared_intermediate=width * shared_count)
