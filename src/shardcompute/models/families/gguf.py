"""GGUF reader: from a file's metadata and tensor names to a spec and a layout.

Every key of the architecture is honoured, known to be harmless, or refused. Norms of Gemma models need no 1
added here, and matrices are as in any checkpoint once the file's dimensions are read in our order.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.core.expert_routing import Routing
from shardcompute.models.families.fields import (
    FALLBACK_HINT,
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYER_EXPERTS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    Fields,
)
from shardcompute.models.families.gguf_architectures import (
    GGUF_ARCHITECTURES,
    SAFETENSORS_ONLY,
    GgufArchitecture,
)
from shardcompute.models.families.gguf_foreign import refuse_projector
from shardcompute.models.families.gguf_rope import gguf_ropes, yarn_log_multiplier
from shardcompute.models.families.places import FUSED, Slot, fused_rows, make_layout
from shardcompute.models.families.rope import check_head_dim, yarn_growth
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import Experts, LatentAttention, ModelSpec, NormType

_WHERE = "GGUF metadata"
_HEAD = "output.weight"
LONG_FACTORS = "rope_factors_long.weight"
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")
_IGNORED = (*_ROPE_FACTORS, LONG_FACTORS)
_EPSILONS: Mapping[NormType, str] = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}
_SCORES: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")
"""By ggml's number of the function, from 1."""
_OTHER_AXES = ("mlp.shared_score", "attention.k_up", "attention.v_up")
_HARMLESS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "vocab_size"})


def rope_factors_tensor(tensor_names: Collection[str]) -> str | None:
    """The tensor, if there is one, whose values `from_gguf` wants as `rope_factors`."""
    return next((name for name in _ROPE_FACTORS if name in tensor_names), None)


def from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_factors: Sequence[float] | None = None,
    long_factors: Sequence[float] | None = None,
) -> tuple[ModelSpec, Layout]:
    """Spec and layout of a GGUF file; `rope_factors` are the values of `rope_factors_tensor`, `long_factors` those of
    `LONG_FACTORS`, without which a context ends where they would begin to count.

    Raises UnsupportedModelError for what we would run wrongly, CorruptModelError for what cannot be true.
    """
    names = frozenset(tensor_names)
    general = Fields(metadata, _WHERE)
    architecture = general.text("general.architecture")
    known = _architecture(architecture)
    if rope_factors is None and (tensor := rope_factors_tensor(names)) is not None:
        raise CorruptModelError(
            f"{_WHERE}: the values of {tensor} are needed to rotate and were not given",
            hint="the file is damaged; fetch the model again",
        )
    fields = Fields(metadata, _WHERE, f"{architecture}.")
    spec = _spec(known, fields, general, names, rope_factors, long_factors)
    ahead = range(spec.layer_count, fields.integer("block_count", high=MAX_LAYERS))
    fields.refuse_unread(_HARMLESS)
    ignored = (*_IGNORED, *(f"blk.{layer}.*" for layer in ahead))
    return spec, make_layout(spec, _GgufLocator(spec, known, names).locate, names, ignored)


def _architecture(name: str) -> GgufArchitecture:
    if name in GGUF_ARCHITECTURES:
        return GGUF_ARCHITECTURES[name]
    refuse_projector(name)
    near = difflib.get_close_matches(name[:64], GGUF_ARCHITECTURES, n=1, cutoff=0.0)[0]
    hint = f"the nearest supported architecture is {near}; for its original checkpoint, {FALLBACK_HINT}"
    if (family := SAFETENSORS_ONLY.get(name)) is not None:
        hint = f"take its original checkpoint in safetensors, of the family {family}, which runs"
    raise UnsupportedModelError(f"{_WHERE}: general.architecture {name[:64]!r} is not supported", hint=hint)


def _spec(
    known: GgufArchitecture,
    fields: Fields,
    general: Fields,
    names: frozenset[str],
    rope_factors: Sequence[float] | None,
    long_factors: Sequence[float] | None,
) -> ModelSpec:
    layer_count = _layer_count(fields, names)
    hidden = fields.integer("embedding_length")
    latent = _latent(fields, names) if known.is_latent else None
    heads, kv_heads, head_dim = _heads(fields, hidden) if latent is None else _latent_heads(fields, latent)
    context = fields.integer("context_length", high=MAX_CONTEXT)
    turning = head_dim if latent is None else latent.rotated
    ropes = gguf_ropes(known, fields, turning, context, rope_factors, long_factors)
    is_wide = layer_count == known.layers_scaled_by_width
    layers = known.layers(fields, layer_count, names)
    experts = _experts(known, fields, layer_count)
    if experts is None and any(layer.is_sparse for layer in layers):
        raise fields.corrupt("expert_count", 0, "a number of experts, since the file holds some")
    return ModelSpec(
        family=known.family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.uniform_integer("feed_forward_length", experts.intermediate if experts else None),
        vocab_size=_vocabulary(fields, general),
        context_length=min(rope.context_length for rope in ropes),
        ropes=tuple(rope.rope for rope in ropes),
        norm_eps=fields.number(_EPSILONS[known.norm], high=1.0),
        attention_scale=_latent_scale(fields, latent)
        if latent is not None
        else _scale(known, fields, "attention.scale", (hidden // heads if is_wide else head_dim) ** -0.5),
        activation=known.activation,
        has_gate=known.has_gate,
        norm=known.norm,
        has_norm_bias=known.has_norm_bias,
        is_parallel=known.is_parallel,
        norm_placement=known.norm_placement,
        qk_norm="none" if _lacks_qk_norm(known, experts, names) else known.qk_norm,
        norms_turned=known.norms_turned,
        has_qkv_bias="blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        has_out_bias="blk.0.attn_output.bias" in names,
        has_mlp_bias="blk.0.ffn_up.bias" in names,
        has_sinks=known.is_gpt_oss,
        embedding_scale=_scale(
            known, fields, "embedding_scale", math.sqrt(hidden) if known.is_gemma else 1.0
        ),
        residual_scale=_scale(known, fields, "residual_scale", 1.0),
        logit_scale=_logit_scale(known, fields),
        attention_softcap=_softcap(known, fields, "attn_logit_softcapping", known.attention_softcap),
        logit_softcap=_softcap(known, fields, "final_logit_softcapping", known.logit_softcap),
        tied_head=_HEAD not in names,
        experts=experts,
        latent=latent,
    )


def _lacks_qk_norm(known: GgufArchitecture, experts: Experts | None, names: frozenset[str]) -> bool:
    if experts is not None and experts.count == known.experts_without_qk_norm:
        return True
    return known.may_lack_qk_norm and "blk.0.attn_q_norm.weight" not in names


def _layer_count(fields: Fields, names: frozenset[str]) -> int:
    """Without layers behind the last, which predict further tokens and which we do not run."""
    count = fields.integer("block_count", high=MAX_LAYERS)
    if count > len(names):
        raise fields.corrupt("block_count", count, f"no more than the file's {len(names)} tensors")
    return count - fields.integer("nextn_predict_layers", 0, low=0, high=count - 1)


def _heads(fields: Fields, hidden: int) -> tuple[int, int, int]:
    heads = fields.uniform_integer("attention.head_count", high=MAX_HEAD_DIM)
    kv_heads = fields.uniform_integer("attention.head_count_kv", heads, high=MAX_HEAD_DIM)
    if heads % kv_heads:
        raise fields.corrupt("attention.head_count_kv", kv_heads, f"a divisor of head_count ({heads})")
    head_dim = fields.optional_integer("attention.key_length", high=MAX_HEAD_DIM)
    if head_dim is None:
        if hidden % heads:
            raise fields.corrupt("attention.head_count", heads, f"a divisor of embedding_length ({hidden})")
        head_dim = hidden // heads
    check_head_dim(fields, "attention.key_length", head_dim)
    value_length = fields.integer("attention.value_length", head_dim, high=MAX_HEAD_DIM)
    fields.one_of("attention.value_length", value_length, (head_dim,))
    fields.one_of("attention.causal", fields.flag("attention.causal", True), (True,))
    return heads, kv_heads, head_dim


def _latent(fields: Fields, names: frozenset[str]) -> LatentAttention:
    """Older files give the sizes of a head's keys and values where newer ones give those of what is kept."""
    rank = fields.integer("attention.kv_lora_rank", high=MAX_HEAD_DIM)
    rotated = fields.integer("rope.dimension_count", high=MAX_HEAD_DIM)
    check_head_dim(fields, "rope.dimension_count", rotated)
    key = fields.integer("attention.key_length", high=MAX_HEAD_DIM)
    value = fields.integer("attention.value_length", high=MAX_HEAD_DIM)
    own_key = fields.optional_integer("attention.key_length_mla", high=MAX_HEAD_DIM)
    if own_key is not None:
        if (key, value) != (rank + rotated, rank):
            raise fields.corrupt("attention.key_length", key, f"{rank + rotated}, and {rank} for values")
        key, value = own_key, fields.integer("attention.value_length_mla", high=MAX_HEAD_DIM)
    if key <= rotated:
        raise fields.corrupt("rope.dimension_count", rotated, f"less than the length of keys ({key})")
    return LatentAttention(
        kv_rank=rank,
        plain=key - rotated,
        rotated=rotated,
        value=value,
        q_rank=fields.optional_integer("attention.q_lora_rank", low=0) or None,
        is_absorbed="blk.0.attn_k_b.weight" in names,
    )


def _latent_heads(fields: Fields, latent: LatentAttention) -> tuple[int, int, int]:
    """What a file says of key heads counts for nothing: one is kept, of all heads."""
    heads = fields.uniform_integer("attention.head_count", high=MAX_HEAD_DIM)
    fields.uniform_integer("attention.head_count_kv", heads, high=MAX_HEAD_DIM)
    return heads, 1, latent.kv_rank + latent.rotated


def _latent_scale(fields: Fields, latent: LatentAttention) -> float:
    """YaRN stretches scores instead of turned entries where there is a multiplier, a tenth of its `mscale_all_dim`."""
    scale = float((latent.plain + latent.rotated) ** -0.5)
    growth = 10 * yarn_log_multiplier(fields)
    factor = fields.optional_number("rope.scaling.factor", low=1e-3, high=1e6)
    return scale * yarn_growth(factor, growth) ** 2 if growth and factor is not None else scale


def _vocabulary(fields: Fields, general: Fields) -> int:
    """The number of tokens listed; a file without a tokenizer says it."""
    count = general.length("tokenizer.ggml.tokens")
    if not count:
        return fields.integer("vocab_size", high=MAX_VOCABULARY)
    if count > MAX_VOCABULARY:
        raise general.corrupt("tokenizer.ggml.tokens", count, f"at most {MAX_VOCABULARY} tokens")
    return count


def _scale(known: GgufArchitecture, fields: Fields, name: str, absent: float) -> float:
    """Zero means that there is none."""
    return (fields.number(name, 0.0, low=-1e-9, high=1e6) if known.has_scales else 0.0) or absent


def _logit_scale(known: GgufArchitecture, fields: Fields) -> float:
    if known.logit_scale == "none":
        return 1.0
    scale = fields.number("logit_scale", low=1e-6, high=1e6)
    return scale if known.logit_scale == "times" else 1 / scale


def _softcap(known: GgufArchitecture, fields: Fields, name: str, absent: float | None) -> float | None:
    if not known.is_gemma:
        return None
    return fields.optional_number(name, absent, low=-1e-9) or None


def _experts(known: GgufArchitecture, fields: Fields, layers: int) -> Experts | None:
    if not known.has_experts:
        return None
    count = fields.integer("expert_count", 0, low=0, high=MAX_EXPERTS)
    if count == 0:
        return None
    if count * layers > MAX_LAYER_EXPERTS:
        raise fields.corrupt("expert_count", count, f"at most {MAX_LAYER_EXPERTS} experts in all layers")
    width = fields.optional_integer("expert_feed_forward_length") or fields.uniform_integer(
        "feed_forward_length"
    )
    shared = fields.integer("expert_shared_count", int(known.has_shared_expert), low=0, high=MAX_EXPERTS)
    per_token = fields.integer("expert_used_count", high=count)
    return Experts(
        count,
        per_token,
        width,
        routing=_routing(known, fields, count, per_token),
        shared_intermediate=fields.integer("expert_shared_feed_forward_length", shared * width, low=0),
        has_bias=known.is_gpt_oss,
        swiglu_limit=7.0 if known.is_gpt_oss else None,
        has_shared_gate=known.has_shared_gate,
    )


def _routing(known: GgufArchitecture, fields: Fields, count: int, per_token: int) -> Routing:
    """What keys say of choosing experts; what they do not say is the architecture's."""
    usual = known.routing
    code = fields.integer("expert_gating_func", 1 + _SCORES.index(usual.scores), low=0)
    if code == 2 and known.sigmoid_routing is not None:
        usual = known.sigmoid_routing
    elif known.sigmoid_routing is not None:
        # DeepSeek-V2's own code and `transformers` disagree about what the key does besides.
        fields.one_of("expert_weights_norm", fields.flag("expert_weights_norm", False), (False,))
    # Softmax over the chosen logits alone (3) is the same as over all, divided by the sum of the chosen.
    fields.one_of("expert_gating_func", code, (0, 1, 2, 3) if known.is_gpt_oss else (1, 2))
    scores = _SCORES[code - 1] if code in (1, 2) else usual.scores
    over_chosen = fields.flag("expert_weights_norm", usual.weights_over == "chosen")
    groups = fields.integer("expert_group_count", 1, low=0, high=count) or 1
    chosen = fields.integer("expert_group_used_count", groups, low=0, high=groups) or groups
    if count % groups or (groups > 1 and count // groups < 2):
        raise fields.corrupt("expert_group_count", groups, f"a divisor of {count}, for groups of two or more")
    if chosen * (count // groups) < per_token:
        raise fields.corrupt("expert_group_used_count", chosen, f"groups that hold {per_token} experts")
    return replace(
        usual,
        scores=scores,
        weights_over="chosen" if over_chosen else "all",
        groups=groups if chosen < groups else 1,
        chosen_groups=chosen if chosen < groups else 1,
        scale=fields.number("expert_weights_scale", 0.0, low=-1e-9, high=1e6) or usual.scale,
    )


class _GgufLocator:
    def __init__(self, spec: ModelSpec, known: GgufArchitecture, names: frozenset[str]) -> None:
        self._spec = spec
        self._known = known
        self._names = names
        self._model = {
            "embedding": "token_embd.weight",
            "norm": "output_norm.weight",
            "norm.bias": "output_norm.bias",
            "head": "token_embd.weight" if spec.tied_head else _HEAD,
        }

    def locate(self, slot: Slot) -> TensorPlace:
        if slot.layer is None:
            return slot.at(self._model[slot.name])
        suffix = ".bias" if slot.is_bias or slot.matrix == "mlp.choice_bias" else ".weight"
        block = f"blk.{slot.layer}"
        if slot.expert is not None:
            expert, part = slot.expert
            alone = f"{block}.ffn_{part}.{expert}{suffix}"  # how files before stacked experts did it
            if alone in self._names:
                return slot.at(alone)
            return replace(slot.at(f"{block}.ffn_{part}_exps{suffix}"), expert=expert)
        if self._known.is_fused and slot.matrix in FUSED:
            fused = f"{block}.{'attn_qkv' if slot.matrix.startswith('attention') else 'ffn_up'}{suffix}"
            if fused in self._names:  # q, k and v may also lie apart
                return replace(slot.at(fused), rows=fused_rows(self._spec, slot.matrix))
        place = slot.at(f"{block}.{self._stored(slot)}{suffix}")
        if slot.matrix in _OTHER_AXES:
            return replace(place, stored_shape=_stored_shape(slot))
        if self._known.is_interleaved and slot.matrix in ("attention.q", "attention.k"):
            turning = 2 * len(self._spec.ropes[0].inverse_frequencies)
            return replace(place, interleaved_head_dim=self._spec.head_dim, interleaved_dim=turning)
        return place

    def _stored(self, slot: Slot) -> str:
        has_latents = self._spec.latent is not None and self._spec.latent.q_rank is not None
        return "attn_q_b" if has_latents and slot.matrix == "attention.q" else self._known.names[slot.matrix]


def _stored_shape(slot: Slot) -> tuple[int, ...]:
    """One row is kept as a vector, maps of heads as a stack."""
    rows, columns = slot.shape
    return (columns,) if rows == 1 else (rows // slot.unit, slot.unit, columns)
