"""How a family's files count and route experts."""

from __future__ import annotations

from dataclasses import replace

from shardcompute.core.expert_routing import Routing
from shardcompute.models.families.fields import MAX_EXPERTS, MAX_LAYER_EXPERTS, Fields
from shardcompute.models.spec import Experts


def expert_count(fields: Fields, default: int) -> int:
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
    count = expert_count(fields, 8)
    return Experts(count, _per_token(fields, 2, count), fields.integer("intermediate_size"))


def qwen3_moe_experts(fields: Fields) -> Experts | None:
    return _qwen_experts(fields, count=128, per_token=8, intermediate=768)


def qwen2_moe_experts(fields: Fields) -> Experts | None:
    experts = _qwen_experts(fields, count=60, per_token=4, intermediate=1408)
    shared = fields.integer("shared_expert_intermediate_size", 5632)
    return None if experts is None else replace(experts, shared_intermediate=shared, has_shared_gate=True)


def _qwen_experts(fields: Fields, *, count: int, per_token: int, intermediate: int) -> Experts | None:
    """What is given counts when the fields are absent."""
    count = expert_count(fields, count)
    intermediate = fields.integer("moe_intermediate_size", intermediate)
    renormalises = fields.flag("norm_topk_prob", False)
    if count == 0:
        return None
    routing = Routing(weights_over="chosen" if renormalises else "all")
    return Experts(count, _per_token(fields, per_token, count), intermediate, routing)


def gpt_oss_experts(fields: Fields) -> Experts:
    count = expert_count(fields, 128)
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
