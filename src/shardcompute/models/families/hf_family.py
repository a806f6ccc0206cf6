"""What a model family is, as data: names of tensors, defaults of fields, and small functions for the rest.

Defaults are those of the family's own configuration class, for fields that files leave out. `HF_FAMILIES` (see
`hf_families`) has the families themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardcompute.models.families.fields import MAX_CONTEXT, Fields
from shardcompute.models.families.places import FUSED
from shardcompute.models.spec import Experts, Growth, LatentAttention, Layer, NormPlacement, NormType, QkNorm

Layers = Callable[[Fields, int], tuple[Layer, ...]]
ExpertStack = Literal["halves", "transposed", "interleaved"]
"""All experts' gates and ups in one tensor: gate rows before up rows; so too, but `[in, out]`; or taking turns."""

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


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linear maps have one."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


def no_biases(fields: Fields) -> Biases:
    return Biases()


def qkv_biases(fields: Fields) -> Biases:
    """Always, and no field changes it."""
    return Biases(qkv=True)


def attention_biases(fields: Fields) -> Biases:
    has = fields.flag("attention_bias", False)
    return Biases(qkv=has, out=has)


def sure_attention_biases(fields: Fields) -> Biases:
    has = fields.flag("attention_bias", True)
    return Biases(qkv=has, out=has)


def plain_biases(fields: Fields) -> Biases:
    """One field for attention, one for the feed-forward block."""
    has = fields.flag("attention_bias", False)
    return Biases(qkv=has, out=has, mlp=fields.flag("mlp_bias", False))


def glm_biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("attention_bias", True))


def glm4_moe_biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("attention_bias", False))


def seed_oss_biases(fields: Fields) -> Biases:
    return Biases(
        qkv=fields.flag("attention_bias", True),
        out=fields.flag("attention_out_bias", False),
        mlp=fields.flag("mlp_bias", False),
    )


def ernie_biases(fields: Fields) -> Biases:
    has = fields.flag("use_bias", False)
    return Biases(qkv=has, out=has, mlp=has)


@dataclass(frozen=True, slots=True)
class Scales:
    """What a model multiplies by: embedded rows, scores, what a block adds, and logits."""

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


def usual_scales(fields: Fields, hidden: int, head_dim: int) -> Scales:
    return Scales(head_dim**-0.5)


def gemma_scales(fields: Fields, hidden: int, head_dim: int) -> Scales:
    attention = fields.number("query_pre_attn_scalar", 256.0, low=1e-3) ** -0.5
    return Scales(attention, embedding=math.sqrt(hidden))


def granite_scales(fields: Fields, hidden: int, head_dim: int) -> Scales:
    return Scales(
        fields.number("attention_multiplier", 1.0),
        embedding=fields.number("embedding_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=1 / fields.number("logits_scaling", 1.0, low=1e-6),
    )


def cohere_scales(fields: Fields, hidden: int, head_dim: int) -> Scales:
    return Scales(head_dim**-0.5, logits=fields.number("logit_scale", 0.0625))


def llama4_growth(fields: Fields, parameters: Fields) -> Growth:
    step = fields.integer("floor_scale", 8192, high=MAX_CONTEXT)
    return Growth(fields.number("attn_scale", 0.1, low=-1.0), step, offset=1)


def ministral3_growth(fields: Fields, parameters: Fields) -> Growth:
    parameters.optional_integer("max_position_embeddings", high=MAX_CONTEXT)
    step = parameters.integer("original_max_position_embeddings", high=MAX_CONTEXT)
    return Growth(parameters.number("llama_4_scaling_beta", low=-1.0), step)


@dataclass(frozen=True, slots=True)
class HfFamily:
    """What is the same for all models of a family, and how to read what is not."""

    layers: Layers
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    """Ours to theirs; those that share a name share a matrix, one behind the other."""
    experts: Callable[[Fields], Experts | None] | None = None
    biases: Callable[[Fields], Biases] = attention_biases
    scales: Callable[[Fields, int, int], Scales] = usual_scales
    """Of hidden size and head size."""
    kv_heads: int | None = None
    """When the field is absent; None: as many as there are heads."""
    head_dim: int | None = None
    """When the field is absent; None: hidden size / heads."""
    intermediate_field: str = "intermediate_size"
    intermediate: int | None = None
    """When the field is absent; None: it must be there."""
    activation: str = "silu"
    """When the field is absent."""
    has_gate: bool = True
    norm: NormType = "rms"
    norm_eps: float = 1e-6
    norm_eps_field: str = "rms_norm_eps"
    norm_placement: NormPlacement = "before"
    has_norm_bias: bool = False
    norms_lack_one: bool = False
    """Norm weights are stored as `weight − 1`."""
    is_parallel: bool = False
    qk_norm: QkNorm = "none"
    qk_norm_field: tuple[str, bool] | None = None
    """The field that switches it on, and its default; None: it is always on."""
    norms_turned: bool = False
    theta: float = 10_000.0
    local_theta: float | None = None
    """Sliding layers have a rotation of their own, with this base when the field is absent."""
    rope: Mapping[str, Any] | None = None
    """Rope parameters when there are none."""
    rope_types: Mapping[str, str] = field(default_factory=dict)
    """What this family's files call a kind of scaling that has another name."""
    rope_harmless: frozenset[str] = frozenset()
    """Rope parameters that count for images alone."""
    original_context: int | None = None
    """When the field is absent; None: what the rope parameters say."""
    turning_part: float | None = None
    """How much of a head turns when the field is absent; None: all of it, and no field changes that."""
    is_interleaved: bool = False
    """Entries that turn together lie side by side."""
    query_growth: Callable[[Fields, Fields], Growth] | None = None
    """How queries grow with position, from the fields and the rope's parameters; there is a rotation for it."""
    grows_still: bool = False
    """That rotation does not turn."""
    stacks: ExpertStack = "halves"
    is_tied: bool = False
    is_gemma: bool = False
    """`hidden_activation` is the field that counts; logits may be capped."""
    has_sinks: bool = False
    latent: Callable[[Fields], LatentAttention] | None = None
    predicts: int = 0
    """Layers behind the last that predict further tokens, when the field is absent."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that files leave out and every other family's files have."""
    ignored: tuple[str, ...] = ()
    """Stored tensors that we leave alone (of heads that predict more than one token); a name may end in `*`."""
    harmless: frozenset[str] = frozenset()
    """Fields that files of this family carry and nobody's code reads."""

    @property
    def fused(self) -> frozenset[str]:
        """Our names of those that share a matrix with another."""
        count = Counter(self.names[ours] for ours in FUSED)
        return frozenset(ours for ours in FUSED if count[self.names[ours]] > 1)
