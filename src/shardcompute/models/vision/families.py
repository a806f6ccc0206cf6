"""The families of towers that a `config.json` may name, each as data, and what their files say.

What a tower's file says wrongly is an error; a tower that we would run wrongly is left out with a warning, and its
model takes text alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardcompute.core.errors import UnsupportedModelError
from shardcompute.core.pictures import MAX_PATCHES
from shardcompute.models.families import HARMLESS
from shardcompute.models.families.fields import MAX_HEAD_DIM, MAX_LAYERS, MAX_VOCABULARY, Fields
from shardcompute.models.layout import TOWER, Layout, TensorPlace
from shardcompute.models.spec import Activation, ModelSpec, PicturePrompt, PictureSize, VisionSpec
from shardcompute.models.vision.slots import tower_slots

log = logging.getLogger(__name__)
ShapeOf = Callable[[str], tuple[int, ...]]
"""Of a stored tensor; asked for few, since a file may have to be opened for it."""

_MAX_PATCH = 128
_MAX_MERGE = 16
_MAX_FRAMES = 16
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
}
_HARMLESS = HARMLESS | {"model_type", "num_hidden_layers", "tie_word_embeddings"}
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
_QWEN_LEAST, _QWEN_MOST = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How a family's tower is read: from the outer fields and its own. `names` are ours to theirs, behind one of
    `stems`; `outer_names` lie behind one of `outer_stems`."""

    read: Callable[[Fields, Fields], VisionSpec]
    stems: tuple[str, ...]
    names: Mapping[str, str]
    outer_stems: tuple[str, ...] = ()
    outer_names: Mapping[str, str] | None = None
    layers: str = "blocks"


def _gemma3(outer: Fields, fields: Fields) -> VisionSpec:
    hidden, heads = _heads(fields, "hidden_size", "num_attention_heads")
    edge, patch = fields.integer("image_size", high=1 << 13), _patch(fields)
    side, rows = edge // patch, outer.integer("mm_tokens_per_image", 256, high=MAX_PATCHES)
    row_side = math.isqrt(rows)
    if not 1 <= side * side <= MAX_PATCHES:
        raise fields.corrupt("image_size", edge, f"1 to {MAX_PATCHES} patches of {patch}")
    if row_side**2 != rows or side % row_side:
        raise outer.unsupported(
            "mm_tokens_per_image", rows, f"supported: a square that divides {side}×{side}"
        )
    if fields.integer("num_channels", 3, high=4) != 3:
        raise fields.unsupported("num_channels", 4, "supported: 3")
    row_id = outer.integer("image_token_index", 262_144, low=0, high=MAX_VOCABULARY)
    return VisionSpec(
        family="gemma3",
        layers=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        intermediate=fields.integer("intermediate_size"),
        patch=patch,
        merge=side // row_side,
        prompt=PicturePrompt(
            "<start_of_image>",
            "\n\n<start_of_image>",
            "<image_soft_token>",
            "<end_of_image>\n\n",
            row_id,
        ),
        size=PictureSize(edge=edge),
        resampling="bilinear",
        mean=_HALF,
        deviation=_HALF,
        activation=_activation(fields, "gelu_pytorch_tanh"),
        norm_eps=fields.number("layer_norm_eps", 1e-6, high=1.0),
        positions=side * side,
        is_pooled=True,
        is_bidirectional=True,
    )


def _qwen(family: str, outer: Fields, fields: Fields, hidden_field: str) -> VisionSpec:
    hidden, heads = _heads(fields, hidden_field, "num_heads")
    if hidden // heads % 4:
        raise fields.corrupt(hidden_field, hidden, f"{heads} heads of a multiple of 4")
    channels = fields.integer("in_channels", fields.integer("in_chans", 3, high=4), high=4)
    patch = _patch(fields)
    if channels != 3 or fields.integer("spatial_patch_size", patch, high=_MAX_PATCH) != patch:
        raise fields.unsupported("in_channels", channels, "supported: 3, and one size of patches")
    _check_axial(fields)
    row_id = outer.integer("image_token_id", 151_655, low=0, high=MAX_VOCABULARY)
    return VisionSpec(
        family=family,
        layers=fields.integer("depth", 32, high=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        intermediate=1,
        patch=patch,
        merge=fields.integer("spatial_merge_size", 2, high=_MAX_MERGE),
        prompt=PicturePrompt("<|image_pad|>", "", "<|image_pad|>", "", row_id),
        size=PictureSize(0, _QWEN_LEAST, _QWEN_MOST),
        resampling="bicubic",
        mean=_CLIP_MEAN,
        deviation=_CLIP_DEVIATION,
        frames=fields.integer("temporal_patch_size", 2, high=_MAX_FRAMES),
    )


def _qwen2(outer: Fields, fields: Fields) -> VisionSpec:
    vision = _qwen("qwen2_vl", outer, fields, "embed_dim")
    fields.integer("hidden_size")
    ratio = fields.number("mlp_ratio", 4, high=64)
    return replace(
        vision, intermediate=int(vision.hidden * ratio), activation=_activation(fields, "quick_gelu")
    )


def _qwen2_5(outer: Fields, fields: Fields) -> VisionSpec:
    vision = _qwen("qwen2_5_vl", outer, fields, "hidden_size")
    fields.integer("out_hidden_size")
    window = fields.integer("window_size", 112, high=1 << 16) // vision.merge // vision.patch
    if window < 1:
        raise fields.corrupt("window_size", window, "at least one merged patch")
    whole = fields.integers("fullatt_block_indexes", high=MAX_LAYERS)
    return replace(
        vision,
        intermediate=fields.integer("intermediate_size"),
        activation=_activation(fields, "silu"),
        has_gate=True,
        norm="rms",
        window=window,
        whole_layers=(7, 15, 23, 31) if whole is None else tuple(whole),
    )


_SIGLIP_NAMES: Mapping[str, str] = {
    "patch": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "attention.norm": "layer_norm1",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "mlp.norm": "layer_norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "norm": "post_layernorm",
}
_QWEN2_NAMES: Mapping[str, str] = {
    "patch": "patch_embed.proj",
    "attention.norm": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "mlp.norm": "norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "norm": "merger.ln_q",
    "merge.inner": "merger.mlp.0",
    "merge.out": "merger.mlp.2",
}
_QWEN2_5_NAMES: Mapping[str, str] = {
    **_QWEN2_NAMES,
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "gemma3": VisionFamily(
        _gemma3,
        tuple(f"{outer}vision_tower.{inner}" for inner in ("vision_model.", "") for outer in ("", "model.")),
        _SIGLIP_NAMES,
        ("multi_modal_projector.", "model.multi_modal_projector."),
        {"row_norm": "mm_soft_emb_norm.weight", "merge.out": "mm_input_projection_weight"},
        "encoder.layers",
    ),
    "qwen2_vl": VisionFamily(_qwen2, ("visual.", "model.visual."), _QWEN2_NAMES),
    "qwen2_5_vl": VisionFamily(_qwen2_5, ("visual.", "model.visual."), _QWEN2_5_NAMES),
}
"""By the model's `model_type`: those whose towers our own backends run."""
_HARMLESS_OF: Mapping[str, frozenset[str]] = {
    "gemma3": frozenset({"vision_use_head"}),
    "qwen2_vl": frozenset({"hidden_size", "image_size"}),
    "qwen2_5_vl": frozenset({"tokens_per_second", "image_size", "num_attention_heads"}),
}


def with_vision(
    spec: ModelSpec,
    layout: Layout,
    config: Mapping[str, Any],
    stored: Collection[str],
    shape_of: ShapeOf,
    processor: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> tuple[ModelSpec, Layout]:
    """Spec and layout with the tower that a config names and a checkpoint with these tensors has, or as they are.

    `processor` gives the settings of the model's own image processor, where there is a file of them. Raises
    CorruptModelError for what cannot be true."""
    kind = config.get("model_type")
    family = VISION_FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not any(name.startswith(family.stems) for name in stored):
        return spec, layout
    try:
        vision = _read_vision(spec, family, config, len(stored), processor())
        places = _tower_places(family, vision, spec.hidden, stored)
        _check_patches(vision, places[f"{TOWER}patch"], shape_of)
    except UnsupportedModelError as error:
        log.warning("pictures are not taken: %s", error.message)
        return spec, layout
    axes = () if vision.positions else _axes(spec, config)
    ropes = tuple(replace(rope, axes=axes) for rope in spec.ropes)
    return (
        replace(spec, vision=vision, ropes=ropes),
        replace(layout, model={**layout.model, **places}),
    )


def _read_vision(
    spec: ModelSpec,
    family: VisionFamily,
    config: Mapping[str, Any],
    stored_count: int,
    processor: Mapping[str, Any] | None,
) -> VisionSpec:
    outer = Fields(config, "config.json")
    own = outer.child("vision_config") or Fields({}, "config.json: vision_config")
    vision = family.read(outer, own)
    own.refuse_unread(_HARMLESS | _HARMLESS_OF[vision.family])
    if vision.layers > stored_count:
        raise own.corrupt(
            "depth", vision.layers, f"at most as many layers as there are tensors ({stored_count})"
        )
    if vision.prompt.row_id >= spec.vocab_size:
        raise outer.unsupported(
            "image_token_id", vision.prompt.row_id, "supported: a token of the vocabulary"
        )
    if processor is not None:
        vision = with_processor(vision, Fields(processor, "the image processor's settings"))
    most = MAX_PATCHES * vision.patch**2
    return replace(vision, size=replace(vision.size, most_pixels=min(vision.size.most_pixels, most)))


def with_processor(vision: VisionSpec, fields: Fields) -> VisionSpec:
    """The spec with what an image processor's file says; UnsupportedModelError for steps that we do not take."""
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not fields.flag(name, True):
            raise fields.unsupported(name, False, "supported: true")
    if fields.flag("do_pan_and_scan", False):
        raise fields.unsupported("do_pan_and_scan", True, "supported: false")
    factor = fields.number("rescale_factor", 1 / 255)
    if abs(factor - 1 / 255) > 1e-9:
        raise fields.unsupported("rescale_factor", factor, "supported: 1/255")
    for name, expected in (
        ("patch_size", vision.patch),
        ("merge_size", vision.merge),
        ("temporal_patch_size", vision.frames),
    ):
        if not vision.size.edge and fields.integer(name, expected) != expected:
            raise fields.corrupt(name, name, f"{expected}, as config.json has it")
    resampling = {"bilinear": 2, "bicubic": 3}
    if fields.integer("resample", resampling[vision.resampling]) != resampling[vision.resampling]:
        raise fields.unsupported("resample", "another", f"supported: {resampling[vision.resampling]}")
    return replace(
        vision,
        mean=_channels(fields, "image_mean", vision.mean),
        deviation=_channels(fields, "image_std", vision.deviation),
        size=_size(vision, fields),
    )


def _size(vision: VisionSpec, fields: Fields) -> PictureSize:
    size, inner = vision.size, fields.child("size")
    if size.edge:
        edges = (
            {inner.integer(name, size.edge) for name in ("height", "width")}
            if inner is not None
            else {size.edge}
        )
        if edges != {size.edge}:
            raise fields.corrupt("size", edges, f"{size.edge}, as config.json has it")
        return size
    least, most = size.least_pixels, size.most_pixels
    if inner is not None:
        least = inner.integer("shortest_edge", inner.integer("min_pixels", least, high=1 << 40), high=1 << 40)
        most = inner.integer("longest_edge", inner.integer("max_pixels", most, high=1 << 40), high=1 << 40)
    least = fields.integer("min_pixels", least, high=1 << 40)
    most = fields.integer("max_pixels", most, high=1 << 40)
    if least > most or least > MAX_PATCHES * vision.patch**2:
        raise fields.corrupt("min_pixels", least, f"at most max_pixels ({most})")
    return PictureSize(0, least, most)


def _channels(fields: Fields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    values = fields.numbers(name)
    if values is None:
        return default
    if len(values) != 3:
        raise fields.corrupt(name, values, "three numbers")
    return values[0], values[1], values[2]


def _tower_places(
    family: VisionFamily, vision: VisionSpec, width: int, stored: Collection[str]
) -> dict[str, TensorPlace]:
    stem = _stem(family.stems, f"{family.names['patch']}.weight", stored)
    outer_names = family.outer_names or {}
    outer = _stem(family.outer_stems, next(iter(outer_names.values()), ""), stored)
    places = {}
    for name, shape in tower_slots(vision, width):
        own = outer_names.get(name)
        place = TensorPlace(f"{outer}{own}" if own else stem + _stored_name(family, name), shape)
        if name == "patch":
            frames = () if vision.positions else (vision.frames,)
            place = replace(place, stored_shape=(vision.hidden, 3, *frames, vision.patch, vision.patch))
        elif own is not None:
            # The norm of the projector lacks one, its matrix lies [in, out].
            place = replace(place, plus_one=len(shape) == 1, is_transposed=len(shape) == 2)
        if place.stored not in stored:
            raise UnsupportedModelError(f"the checkpoint has no {place.stored}", hint="fetch it again, whole")
        places[f"{TOWER}{name}"] = place
    return places


def _check_patches(vision: VisionSpec, place: TensorPlace, shape_of: ShapeOf) -> None:
    """Some programs write convolutions in another order, of as many numbers."""
    shape = shape_of(place.stored)
    is_same = shape in (place.stored_shape, place.shape)
    if not is_same and sorted(shape) == sorted(place.stored_shape or ()):
        raise UnsupportedModelError(
            f"{place.stored} lies in another order than its family's",
            hint="use the checkpoint as its makers published it",
        )


def _stored_name(family: VisionFamily, name: str) -> str:
    prefix, suffix = "", ".weight"
    if name.endswith(".bias"):
        name, suffix = name.removesuffix(".bias"), ".bias"
    if name.startswith("layers."):
        _, layer, name = name.split(".", 2)
        prefix = f"{family.layers}.{layer}."
    return prefix + family.names[name] + suffix


def _stem(stems: tuple[str, ...], name: str, stored: Collection[str]) -> str:
    return next((stem for stem in stems if stem + name in stored), stems[0] if stems else "")


def _axes(spec: ModelSpec, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Which axis each frequency turns by: sections of them, one for each axis."""
    text = config.get("text_config")
    fields = Fields(text if isinstance(text, Mapping) else config, "config.json")
    rope = fields.child("rope_parameters") or fields.child("rope_scaling")
    sections = rope.integers("mrope_section", low=0) if rope is not None else None
    sections = sections or [16, 24, 24]
    if len(sections) != 3 or sum(sections) != len(spec.ropes[0].inverse_frequencies):
        half = len(spec.ropes[0].inverse_frequencies)
        raise fields.corrupt("mrope_section", sections, f"three numbers of pairs, {half} in all")
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _heads(fields: Fields, hidden_field: str, heads_field: str) -> tuple[int, int]:
    hidden = fields.integer(hidden_field)
    heads = fields.integer(heads_field, high=MAX_HEAD_DIM)
    if hidden % heads:
        raise fields.corrupt(heads_field, heads, f"a divisor of {hidden_field} ({hidden})")
    return hidden, heads


def _patch(fields: Fields) -> int:
    return fields.integer("patch_size", 14, high=_MAX_PATCH)


def _activation(fields: Fields, default: str) -> Activation:
    return _ACTIVATIONS[fields.one_of("hidden_act", fields.text("hidden_act", default), _ACTIVATIONS)]


def _check_axial(fields: Fields) -> None:
    rope = fields.child("rope_parameters")
    if rope is None:
        return
    theta, kind = rope.number("rope_theta", 10_000.0), rope.text("rope_type", "axial")
    if (theta, kind) != (10_000.0, "axial"):
        raise rope.unsupported("rope_theta", theta, "supported: 10000, axial")
    rope.refuse_unread(())
