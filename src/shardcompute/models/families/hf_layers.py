"""Which layers of a family look how far, turn by which rotation and have experts: what no table can say."""

from __future__ import annotations

from shardcompute.models.families.fields import MAX_CONTEXT, Fields
from shardcompute.models.families.hf_experts import expert_count
from shardcompute.models.spec import Layer

FULL, SLIDING = "full_attention", "sliding_attention"


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
    has_experts = expert_count(fields, 128) > 0
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
