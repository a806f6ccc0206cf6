"""The architectures that a GGUF file may name, each as data.

GGUF files leave out what their writers took for known (which layers slide, how attention is scaled); that
knowledge is here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardcompute.core.expert_routing import PLAIN_ROUTING, Routing
from shardcompute.models.families.fields import MAX_CONTEXT, MAX_LAYERS, Fields
from shardcompute.models.spec import Activation, Growth, Layer, NormPlacement, NormType

Layers = Callable[[Fields, int, Collection[str]], tuple[Layer, ...]]

_NAMES: Mapping[str, str] = {
    "attention.norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.out": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.sinks": "attn_sinks",
    "mlp.norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.choice_bias": "exp_probs_b",
    "shared.gate": "ffn_gate_shexp",
    "shared.up": "ffn_up_shexp",
    "shared.down": "ffn_down_shexp",
    "mlp.shared_score": "ffn_gate_inp_shexp",
    "attention.q_down": "attn_q_a",
    "attention.q_latent_norm": "attn_q_a_norm",
    "attention.kv_down": "attn_kv_a_mqa",
    "attention.kv_norm": "attn_kv_a_norm",
    "attention.kv_up": "attn_kv_b",
    "attention.k_up": "attn_k_b",
    "attention.v_up": "attn_v_b",
}
_POST_NORM_NAMES = {
    **_NAMES,
    "attention.post_norm": "post_attention_norm",
    "mlp.post_norm": "post_ffw_norm",
}
_LATE_NAMES = {**_NAMES, "mlp.norm": "post_attention_norm"}
"""Where the norm before the feed-forward block is called after what lies before it."""


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What is the same for all models of an architecture, and how to read what is not."""

    family: str
    layers: Layers
    names: Mapping[str, str] = field(default_factory=lambda: _NAMES)
    is_interleaved: bool = False
    """Rows of q and k are ordered for rotary pairs that lie side by side."""
    has_experts: bool = False
    has_partial_rope: bool = False
    is_fused: bool = False
    """q, k and v may be one matrix; gate and up are one."""
    norm_placement: NormPlacement = "before"
    qk_norm: Literal["none", "head", "width", "unit"] = "none"
    may_lack_qk_norm: bool = False
    """Models without the norms' tensors do without."""
    norms_turned: bool = False
    query_growth: Growth | None = None
    """How queries of layers that do not turn grow with position."""
    experts_without_qk_norm: int | None = None
    """The model of this many experts has no norms of queries and keys."""
    activation: Activation = "silu"
    is_gemma: bool = False
    layers_scaled_by_width: int | None = None
    """The model of this many layers scales attention by hidden / heads instead of the head's size."""
    local_theta: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    is_gpt_oss: bool = False
    """Sinks, biased experts with a clamped gate, YaRN without truncation."""
    norm: NormType = "rms"
    has_norm_bias: bool = False
    has_gate: bool = True
    is_parallel: bool = False
    logit_scale: Literal["none", "times", "over"] = "none"
    """The key `logit_scale`: not known, what logits are multiplied by, or divided by."""
    has_scales: bool = False
    """Keys say what embeddings, residuals and scores are multiplied by."""
    routing: Routing = PLAIN_ROUTING
    """How experts are chosen where no key says so."""
    sigmoid_routing: Routing | None = None
    """The same for models whose key says that scores are by sigmoid."""
    has_shared_gate: bool = False
    has_shared_expert: bool = False
    """One, as wide as the others, though no key says so."""
    is_latent: bool = False
    """Latent attention, and scores that grow with what `rope.scaling.yarn_log_multiplier` says."""


def _window(fields: Fields, absent: int | None) -> int | None:
    return fields.optional_integer("attention.sliding_window", absent, low=0, high=MAX_CONTEXT) or None


def _is_sparse(layer: int, names: Collection[str]) -> bool:
    return f"blk.{layer}.ffn_gate_inp.weight" in names


def full_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    return tuple(Layer(is_sparse=_is_sparse(i, names)) for i in range(count))


def windowed_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    window = _window(fields, None)
    return tuple(Layer(window=window, is_sparse=_is_sparse(i, names)) for i in range(count))


def smollm3_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    return tuple(Layer(rope=None if (i + 1) % 4 == 0 else 0) for i in range(count))


def gemma2_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    slides = _pattern(fields, count, 2)
    window = _window(fields, 4096)
    return tuple(Layer(window=window if slides[i] else None) for i in range(count))


def gemma3_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    slides = _pattern(fields, count, 6)
    window = _window(fields, None)
    if window is None:
        return (Layer(),) * count
    return tuple(Layer(rope=1, window=window) if slides[i] else Layer() for i in range(count))


def cohere2_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    """Layers that see everything do not turn."""
    slides, window = _pattern(fields, count, 4), _window(fields, 4096)
    return tuple(Layer(window=window) if slides[i] else Layer(rope=None) for i in range(count))


def exaone4_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    """Without a window all layers turn and see everything."""
    slides, window = _pattern(fields, count, 4), _window(fields, None)
    if window is None:
        return (Layer(),) * count
    return tuple(Layer(window=window) if slides[i] else Layer(rope=None) for i in range(count))


def led_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    """The first layers are dense, as a key says and the tensors must too."""
    first = fields.integer("leading_dense_block_count", 0, low=0, high=count)
    layers = windowed_layers(fields, count, names)
    if [layer.is_sparse for layer in layers] != [i >= first for i in range(count)]:
        raise fields.corrupt(
            "leading_dense_block_count", first, "as many layers without experts as there are"
        )
    return layers


def ernie_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    step = fields.integer("interleave_moe_layer_step", 1, low=0)
    fields.one_of("interleave_moe_layer_step", step, (0, 1))
    return led_layers(fields, count, names)


def llama4_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    """Every fourth layer sees everything and does not turn; others see their own chunk."""
    step = fields.integer("interleave_moe_layer_step", 1, high=MAX_LAYERS)
    sparse = [_is_sparse(i, names) for i in range(count)]
    if sparse != [(i + 1) % step == 0 for i in range(count)]:
        raise fields.corrupt("interleave_moe_layer_step", step, "the distance of layers with experts")
    full = Layer(rope=None, query_rope=1)
    return tuple(
        replace(full if (i + 1) % 4 == 0 else Layer(chunk=8192), is_sparse=sparse[i]) for i in range(count)
    )


def gpt_oss_layers(fields: Fields, count: int, names: Collection[str]) -> tuple[Layer, ...]:
    slides = _pattern(fields, count, 2)
    window = _window(fields, 128)
    return tuple(Layer(window=window if slides[i] else None, is_sparse=True) for i in range(count))


def _pattern(fields: Fields, count: int, default: int) -> list[bool]:
    """Which layers slide: a list of them, or all but every n-th."""
    name = "attention.sliding_window_pattern"
    if fields.is_list(name):
        slides = fields.flags(name) or []
        if len(slides) != count:
            raise fields.corrupt(name, slides, f"a list of {count}")
        return slides
    every = fields.integer(name, default)
    return [(i + 1) % every != 0 for i in range(count)]


_SIGMOID_ROUTING = Routing(scores="sigmoid", has_choice_bias=True)
_GROUPED_ROUTING = replace(_SIGMOID_ROUTING, group_by="best_two")
GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", windowed_layers, is_interleaved=True, has_experts=True),
    "qwen2": GgufArchitecture("qwen2", full_layers),
    "qwen3": GgufArchitecture("qwen3", full_layers, qk_norm="head"),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        full_layers,
        has_experts=True,
        has_shared_gate=True,
        routing=Routing(weights_over="all"),
    ),
    "deepseek2": GgufArchitecture(
        "deepseek_v3",
        led_layers,
        has_experts=True,
        is_latent=True,
        routing=Routing(weights_over="all"),
        sigmoid_routing=replace(_GROUPED_ROUTING, weights_over="all"),
    ),
    "qwen3moe": GgufArchitecture("qwen3_moe", full_layers, has_experts=True, qk_norm="head"),
    "gemma2": GgufArchitecture(
        "gemma2",
        gemma2_layers,
        _POST_NORM_NAMES,
        norm_placement="around",
        activation="gelu_tanh",
        is_gemma=True,
        layers_scaled_by_width=46,
        attention_softcap=50.0,
        logit_softcap=30.0,
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        gemma3_layers,
        _POST_NORM_NAMES,
        norm_placement="around",
        qk_norm="head",
        activation="gelu_tanh",
        is_gemma=True,
        layers_scaled_by_width=62,
        local_theta=10_000.0,
    ),
    "phi3": GgufArchitecture("phi3", windowed_layers, has_partial_rope=True, is_fused=True),
    "olmo2": GgufArchitecture(
        "olmo2", full_layers, _POST_NORM_NAMES, norm_placement="after", qk_norm="width"
    ),
    "smollm3": GgufArchitecture("smollm3", smollm3_layers, is_interleaved=True),
    "gpt-oss": GgufArchitecture("gpt_oss", gpt_oss_layers, _LATE_NAMES, has_experts=True, is_gpt_oss=True),
    "granite": GgufArchitecture(
        "granite", full_layers, is_interleaved=True, has_scales=True, logit_scale="over"
    ),
    "granitemoe": GgufArchitecture(
        "granitemoe",
        full_layers,
        is_interleaved=True,
        has_experts=True,
        has_scales=True,
        logit_scale="over",
    ),
    "hunyuan-dense": GgufArchitecture("hunyuan_v1_dense", full_layers, qk_norm="head", norms_turned=True),
    "hunyuan-moe": GgufArchitecture(
        "hunyuan_v1_moe", full_layers, has_experts=True, qk_norm="head", norms_turned=True
    ),
    "ernie4_5-moe": GgufArchitecture(
        "ernie4_5_moe",
        ernie_layers,
        is_interleaved=True,
        has_experts=True,
        routing=Routing(has_choice_bias=True),
    ),
    "llama4": GgufArchitecture(
        "llama4_text",
        llama4_layers,
        is_interleaved=True,
        has_experts=True,
        has_shared_expert=True,
        qk_norm="unit",
        experts_without_qk_norm=128,
        norms_turned=True,
        query_growth=Growth(0.1, 8192, offset=1),
        routing=Routing(scores="sigmoid", weights_over="all", weighs_input=True),
    ),
    "arcee": GgufArchitecture("arcee", full_layers, is_interleaved=True, activation="relu2", has_gate=False),
    "command-r": GgufArchitecture(
        "cohere", full_layers, is_interleaved=True, norm="layer", is_parallel=True, logit_scale="times"
    ),
    "cohere2": GgufArchitecture(
        "cohere2", cohere2_layers, is_interleaved=True, norm="layer", is_parallel=True, logit_scale="times"
    ),
    "seed_oss": GgufArchitecture("seed_oss", full_layers, _LATE_NAMES),
    "ernie4_5": GgufArchitecture("ernie4_5", full_layers, is_interleaved=True),
    "exaone4": GgufArchitecture(
        "exaone4", exaone4_layers, _POST_NORM_NAMES, norm_placement="after", qk_norm="head"
    ),
    "nemotron": GgufArchitecture(
        "nemotron",
        full_layers,
        has_partial_rope=True,
        activation="relu2",
        has_gate=False,
        norm="layer",
        has_norm_bias=True,
    ),
    "glm4": GgufArchitecture(
        "glm4",
        full_layers,
        _POST_NORM_NAMES,
        is_interleaved=True,
        has_partial_rope=True,
        is_fused=True,
        norm_placement="around",
    ),
    "olmoe": GgufArchitecture(
        "olmoe", full_layers, has_experts=True, qk_norm="width", routing=Routing(weights_over="all")
    ),
    "dots1": GgufArchitecture(
        "dots1", led_layers, has_experts=True, qk_norm="head", routing=_GROUPED_ROUTING
    ),
    "glm4moe": GgufArchitecture(
        "glm4_moe",
        led_layers,
        _LATE_NAMES,
        has_experts=True,
        has_partial_rope=True,
        qk_norm="head",
        may_lack_qk_norm=True,
        routing=_GROUPED_ROUTING,
    ),
    "minimax-m2": GgufArchitecture(
        "minimax_m2",
        full_layers,
        has_experts=True,
        has_partial_rope=True,
        qk_norm="width",
        routing=_SIGMOID_ROUTING,
    ),
}

SAFETENSORS_ONLY: Mapping[str, str] = {
    "mistral3": "ministral3",
    "qwen2vl": "qwen2_5_vl_text",
    "qwen3vl": "qwen3_vl_text",
    "qwen3vlmoe": "qwen3_vl_moe_text",
}
"""Architectures whose GGUF files are not read, and the family that their safetensors are of."""
