"""What no table can say of a family: which layers look how far, turn and have experts, and how rows choose them."""

from __future__ import annotations

from dataclasses import replace

from shardcompute.core.expert_routing import Routing
from shardcompute.models.families.fields import (
    FALLBACK_HINT,
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_LAYER_EXPERTS,
    Fields,
)
from shardcompute.models.spec import Experts, Layer

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


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


def qwen2_vl_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    window = _window(fields, 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 80, low=0)
    kinds = _kinds(fields, count) or [window is not None and i >= first for i in range(count)]
    return _mixed(fields, kinds, window)


def qwen3_vl_moe_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _stepped(fields, count, None)


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
    return _two_ropes(layers)


def olmo3_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    slides = _kinds(fields, count) or [(i + 1) % 4 != 0 for i in range(count)]
    return _two_ropes(_mixed(fields, slides, _window(fields, 4096)))


def _two_ropes(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Sliding layers turn by the second rotation."""
    return tuple(Layer(rope=0 if layer.window is None else 1, window=layer.window) for layer in layers)


def _turning_where_sliding(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    return tuple(Layer(rope=None if layer.window is None else 0, window=layer.window) for layer in layers)


def cohere2_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    slides = _kinds(fields, count)
    if slides is None:
        every = fields.integer("sliding_window_pattern", 4)
        slides = [(i + 1) % every != 0 for i in range(count)]
    return _turning_where_sliding(_mixed(fields, slides, _window(fields, 4096)))


def exaone4_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    """Without a window all layers turn and see everything; with one, only those that slide turn."""
    window = _window(fields, 4096)
    slides = _kinds(fields, count)
    if window is None:
        return _mixed(fields, slides or [False] * count, None)
    if slides is None:
        every = fields.integer("sliding_window_pattern", 4)
        slides = [(i + 1) % every != 0 for i in range(count)]
    return _turning_where_sliding(_mixed(fields, slides, window))


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


def dots1_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    window = _window(fields, 4096)
    first = fields.integer("max_window_layers", 62, low=0)
    kinds = _kinds(fields, count) or [window is not None and i >= first for i in range(count)]
    return _sparse_from(_mixed(fields, kinds, window), fields.integer("first_k_dense_replace", 0, low=0))


def glm4_moe_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _sparse_from(full_layers(fields, count), fields.integer("first_k_dense_replace", 1, low=0))


def _sparse_from(layers: tuple[Layer, ...], first: int) -> tuple[Layer, ...]:
    return tuple(replace(layer, is_sparse=i >= first) for i, layer in enumerate(layers))


def sparse_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return _uniform(fields, count, None, is_sparse=True)


def ernie4_5_moe_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    first = fields.integer("moe_layer_start_index", 1, low=0)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    every = fields.integer("moe_layer_interval", 1)
    stop = count if last == -1 else last + 1
    return tuple(Layer(is_sparse=(i + 1) % every == 0 and first <= i < stop) for i in range(count))


def granite4_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    """Attention in every layer: those with a state are not among what we run."""
    kinds = fields.texts("layer_types") or ["mamba"] * count
    if len(kinds) != count:
        raise fields.corrupt("layer_types", kinds, f"a list of {count}")
    if not set(kinds) <= {FULL, "attention"}:
        hint = f"layers with a recurrent state are not run by our own backends; {FALLBACK_HINT}"
        raise fields.unsupported("layer_types", sorted(set(kinds)), hint)
    position = fields.text("position_embedding_type", "nope")
    turns = fields.one_of("position_embedding_type", position, ("rope", "nope")) == "rope"
    return (Layer(rope=0 if turns else None, is_sparse=_expert_count(fields, 8) > 0),) * count


def llama4_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    """Layers that turn see their own chunk; those that do not, everything, by queries that grow with position."""
    interval = fields.integer("no_rope_layer_interval", 4)
    turns = fields.integers("no_rope_layers", high=1) or [int((i + 1) % interval != 0) for i in range(count)]
    step = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.integers("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, count, step))
    kinds = fields.texts("layer_types") or [CHUNKED if turn else FULL for turn in turns]
    if len(turns) < count or len(kinds) != count:
        raise fields.corrupt("no_rope_layers", turns, f"a list of {count}, as layer_types is")
    chunk = fields.optional_integer("attention_chunk_size", 8192, high=MAX_CONTEXT)
    growing = 1 if fields.flag("attn_temperature_tuning", True) else None
    return tuple(
        Layer(
            rope=0 if turns[i] else None,
            query_rope=None if turns[i] else growing,
            chunk=chunk if fields.one_of("layer_types", kinds[i], (FULL, CHUNKED)) == CHUNKED else None,
            is_sparse=i in sparse,
        )
        for i in range(count)
    )


def ministral3_layers(fields: Fields, count: int) -> tuple[Layer, ...]:
    return tuple(replace(layer, query_rope=1) for layer in phi3_layers(fields, count))


def _expert_count(fields: Fields, default: int) -> int:
    """Files call it by either name; `num_local_experts` is the newer one."""
    older = fields.integer("num_experts", default, low=0, high=MAX_EXPERTS)
    count = fields.integer("num_local_experts", older, low=0, high=MAX_EXPERTS)
    _check_experts(fields, "num_local_experts", count)
    return count


def _check_experts(fields: Fields, name: str, count: int) -> None:
    if count * fields.integer("num_hidden_layers") > MAX_LAYER_EXPERTS:
        raise fields.corrupt(name, count, f"at most {MAX_LAYER_EXPERTS} experts in all layers")


def _per_token(fields: Fields, default: int, count: int) -> int:
    return fields.integer("num_experts_per_tok", min(default, count), high=count)


def mixtral_experts(fields: Fields) -> Experts:
    count = _expert_count(fields, 8)
    return Experts(count, _per_token(fields, 2, count), fields.integer("intermediate_size"))


def qwen3_moe_experts(fields: Fields) -> Experts | None:
    return _qwen_experts(fields, count=128, per_token=8, intermediate=768)


def qwen3_vl_moe_experts(fields: Fields) -> Experts | None:
    """Weights are divided by their sum, whatever the field says."""
    experts = _qwen_experts(fields, count=60, per_token=4, intermediate=1408)
    return None if experts is None else replace(experts, routing=Routing())


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


def _sigmoid_experts(
    fields: Fields, *, count: int | None, per_token: int, shared: int, renormalises: bool
) -> Experts:
    """Sigmoid scores, a bias for the choice, groups; what is given counts when the fields are absent."""
    total = fields.integer("n_routed_experts", count, high=MAX_EXPERTS)
    _check_experts(fields, "n_routed_experts", total)
    width = fields.integer("moe_intermediate_size", 1408)
    shared = fields.integer("n_shared_experts", shared, low=0, high=MAX_EXPERTS)
    groups = fields.integer("n_group", 1)
    routing = Routing(
        scores="sigmoid",
        weights_over="chosen" if fields.flag("norm_topk_prob", renormalises) else "all",
        has_choice_bias=True,
        groups=groups,
        chosen_groups=fields.integer("topk_group", 1, high=groups),
        group_by="best_two",
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    if total % groups or total // groups < 2:
        raise fields.corrupt("n_group", groups, f"a divisor of {total} experts, with two or more in a group")
    return Experts(
        total, _per_token(fields, per_token, total), width, routing, shared_intermediate=shared * width
    )


def glm4_moe_experts(fields: Fields) -> Experts:
    return _sigmoid_experts(fields, count=128, per_token=8, shared=1, renormalises=True)


def dots1_experts(fields: Fields) -> Experts:
    return _sigmoid_experts(fields, count=None, per_token=1, shared=0, renormalises=False)


def ernie4_5_moe_experts(fields: Fields) -> Experts:
    count = fields.integer("moe_num_experts", 64, high=MAX_EXPERTS)
    _check_experts(fields, "moe_num_experts", count)
    width = fields.integer("moe_intermediate_size", 1536)
    return Experts(
        count,
        fields.integer("moe_k", min(6, count), high=count),
        width,
        Routing(has_choice_bias=True),
        shared_intermediate=width * fields.integer("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS),
    )


def minimax_m2_experts(fields: Fields) -> Experts:
    count = _expert_count(fields, 256)
    routing = Routing(scores="sigmoid", has_choice_bias=True)
    return Experts(count, _per_token(fields, 8, count), fields.integer("intermediate_size"), routing)


def hunyuan_moe_experts(fields: Fields) -> Experts:
    count = fields.uniform_integer("num_experts", 1, high=MAX_EXPERTS)
    _check_experts(fields, "num_experts", count)
    width = fields.integer("intermediate_size")
    fields.one_of("moe_intermediate_size", fields.uniform_integer("moe_intermediate_size", width), (width,))
    fields.one_of("num_shared_expert", fields.uniform_integer("num_shared_expert", 1), (1,))
    per_token = fields.uniform_integer("moe_topk", 1, high=count)
    return Experts(count, per_token, width, shared_intermediate=width)


def olmoe_experts(fields: Fields) -> Experts:
    count = _expert_count(fields, 64)
    routing = Routing(weights_over="chosen" if fields.flag("norm_topk_prob", False) else "all")
    return Experts(count, _per_token(fields, 8, count), fields.integer("intermediate_size"), routing)


def granite_shared_experts(fields: Fields) -> Experts:
    shared = fields.integer("shared_intermediate_size", 0, low=0)
    return replace(mixtral_experts(fields), shared_intermediate=shared)


def granite4_experts(fields: Fields) -> Experts | None:
    """Without experts the shared block is the only one."""
    count = _expert_count(fields, 8)
    per_token = fields.integer("num_experts_per_tok", 2, low=0)
    shared = fields.integer("shared_intermediate_size", 1024)
    width = fields.integer("intermediate_size")
    if count == 0:
        return None
    return Experts(count, min(per_token, count), width, shared_intermediate=shared)


def llama4_experts(fields: Fields) -> Experts:
    count = _expert_count(fields, 16)
    width = fields.integer("intermediate_size")
    routing = Routing(scores="sigmoid", weights_over="all", weighs_input=True)
    return Experts(count, _per_token(fields, 1, count), width, routing, shared_intermediate=width)
