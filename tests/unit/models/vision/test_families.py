"""Towers from configs: what is read, what cannot be true, and what is left out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from shardcompute.core.errors import CorruptModelError
from shardcompute.core.pictures import MAX_PATCHES
from shardcompute.models.families import HF_SEEING, from_hf_config, outline_of_config
from shardcompute.models.layout import TOWER, Layout
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.models.vision.families import VISION_FAMILIES, with_vision
from support.seeing.tiny_seeing import SEEING_PICTURES, stored_shapes

SHAPES = {name: stored_shapes(name) for name in SEEING_PICTURES}


def _config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(SEEING_PICTURES[name]().to_dict())
    return config


def _open(
    name: str, config: Mapping[str, Any], processor: Mapping[str, Any] | None = None
) -> tuple[ModelSpec, Layout]:
    spec, layout = from_hf_config(config, SHAPES[name])
    return with_vision(spec, layout, config, SHAPES[name], SHAPES[name].__getitem__, lambda: processor)


def test_every_family_has_a_tiny_model() -> None:
    assert set(SEEING_PICTURES) == set(VISION_FAMILIES)


@pytest.mark.parametrize("name", SEEING_PICTURES)
def test_the_tower_belongs_to_the_stage_that_embeds(name: str) -> None:
    spec, layout = _open(name, _config(name))
    assert spec.vision is not None
    tower = {place.stored for key, place in layout.model.items() if key.startswith(TOWER)}
    # All that is stored of it, but a head that nothing of the text reads.
    assert tower == {each for each in SHAPES[name] if "vis" in each or "multi_modal" in each}
    first, last = (
        {place.stored for place in layout.stage_places(stage)} for stage in (Stage(0, 1, 3), Stage(1, 3, 3))
    )
    assert tower <= first
    assert not tower & last


def test_gemma3_says_what_it_needs() -> None:
    vision = _open("gemma3", _config("gemma3"))[0].vision
    assert vision is not None
    assert (vision.positions, vision.merge, vision.is_bidirectional) == (64, 2, True)
    assert vision.prompt.text(2) == (
        "\n\n<start_of_image><image_soft_token><image_soft_token><end_of_image>\n\n"
    )


def test_qwen_turns_by_three_axes() -> None:
    spec, _ = _open("qwen2_5_vl", _config("qwen2_5_vl"))
    assert spec.ropes[0].axes == (0, 0, 1, 1, 1, 2, 2, 2)
    assert spec.vision is not None
    assert (spec.vision.window, spec.vision.whole_layers, spec.vision.is_bidirectional) == (2, (1,), False)


def test_a_processors_settings_count() -> None:
    settings = {"min_pixels": 3136, "max_pixels": 12845056, "image_mean": [0.1, 0.2, 0.3], "patch_size": 14}
    vision = _open("qwen2_vl", _config("qwen2_vl"), settings)[0].vision
    assert vision is not None
    assert vision.mean == (0.1, 0.2, 0.3)
    # More patches than that would cost too much, whatever a file says.
    assert (vision.size.least_pixels, vision.size.most_pixels) == (3136, MAX_PATCHES * 14 * 14)
    newer = {"size": {"shortest_edge": 784, "longest_edge": 7840}}
    vision = _open("qwen2_vl", _config("qwen2_vl"), newer)[0].vision
    assert vision is not None
    assert (vision.size.least_pixels, vision.size.most_pixels) == (784, 7840)


@pytest.mark.parametrize(
    ("name", "part", "changes"),
    [
        ("gemma3", "vision", {"patch_size": 0}),
        ("gemma3", "vision", {"patch_size": 1 << 20}),
        ("gemma3", "vision", {"image_size": 1 << 30}),
        ("gemma3", "vision", {"image_size": 5}),
        ("gemma3", "vision", {"image_size": 8190}),
        ("gemma3", "vision", {"num_attention_heads": 3}),
        ("gemma3", "vision", {"hidden_size": "many"}),
        ("gemma3", "outer", {"mm_tokens_per_image": -4}),
        ("qwen2_vl", "vision", {"patch_size": -1}),
        ("qwen2_vl", "vision", {"spatial_merge_size": 0}),
        ("qwen2_vl", "vision", {"temporal_patch_size": 99}),
        ("qwen2_vl", "vision", {"embed_dim": 31}),
        ("qwen2_vl", "vision", {"embed_dim": 1 << 40}),
        ("qwen2_vl", "vision", {"depth": 1 << 40}),
        ("qwen2_vl", "vision", {"mlp_ratio": float("nan")}),
        ("qwen2_5_vl", "vision", {"window_size": 1}),
        ("qwen2_5_vl", "vision", {"fullatt_block_indexes": [-1]}),
        ("qwen2_5_vl", "text", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 4]}}),
        ("qwen2_5_vl", "text", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [8]}}),
    ],
)
def test_towers_that_cannot_be_are_refused(name: str, part: str, changes: dict[str, Any]) -> None:
    config = _config(name)
    {"outer": config, "vision": config["vision_config"], "text": config["text_config"]}[part].update(changes)
    with pytest.raises(
        CorruptModelError, match=next(iter(changes)).replace("rope_parameters", "mrope_section")
    ):
        _open(name, config)


def test_more_layers_than_tensors_are_refused() -> None:
    config = _config("gemma3")
    config["vision_config"]["num_hidden_layers"] = 1023
    with pytest.raises(CorruptModelError, match="1023"):
        _open("gemma3", config)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2_vl", {"min_pixels": 1 << 41}),
        ("qwen2_vl", {"min_pixels": 5000, "max_pixels": 4000}),
        ("qwen2_vl", {"patch_size": 7}),
        ("qwen2_vl", {"image_std": [0.5]}),
        ("gemma3", {"size": {"height": 7, "width": 7}}),
    ],
)
def test_processors_that_contradict_the_model_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(CorruptModelError):
        _open(name, _config(name), settings)


@pytest.mark.parametrize(
    ("name", "part", "changes"),
    [
        ("gemma3", "vision", {"hidden_act": "relu"}),
        ("gemma3", "vision", {"an_unknown_field": 3}),
        ("gemma3", "outer", {"mm_tokens_per_image": 15}),
        ("gemma3", "outer", {"image_token_index": 100_000}),
        ("qwen2_vl", "vision", {"in_channels": 1}),
        ("qwen2_5_vl", "vision", {"rope_parameters": {"rope_theta": 5.0, "rope_type": "axial"}}),
    ],
)
def test_a_tower_that_we_would_run_wrongly_is_left_out(
    name: str, part: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(name)
    (config if part == "outer" else config["vision_config"]).update(changes)
    with caplog.at_level(logging.WARNING):
        spec, layout = _open(name, config)
    assert spec.vision is None
    assert not any(key.startswith(TOWER) for key in layout.model)
    assert "pictures are not taken" in caplog.text


@pytest.mark.parametrize("settings", [{"do_pan_and_scan": True}, {"do_resize": False}, {"resample": 1}])
def test_processors_that_do_something_else_leave_the_tower_out(settings: dict[str, Any]) -> None:
    assert _open("gemma3", _config("gemma3"), settings)[0].vision is None


def test_a_checkpoint_of_the_text_alone_takes_text_alone() -> None:
    config, shapes = _config("qwen2_vl"), SHAPES["qwen2_vl"]
    text = {name: shape for name, shape in shapes.items() if "visual" not in name}
    spec, layout = from_hf_config(config, text)
    assert with_vision(spec, layout, config, text, text.__getitem__) == (spec, layout)


def test_patches_in_another_order_are_left_out() -> None:
    name = "visual.patch_embed.proj.weight"
    shapes = {**SHAPES["qwen2_vl"], name: (32, 2, 14, 14, 3)}
    config = _config("qwen2_vl")
    spec, layout = from_hf_config(config, shapes)
    assert with_vision(spec, layout, config, shapes, shapes.__getitem__)[0].vision is None


class _Complete(frozenset[str]):
    """The names of a checkpoint that has every tensor that is asked for, behind one stem."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.startswith(tuple(self))

    def __len__(self) -> int:
        return 1000


_QWEN_TEXT = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
_QWEN_VISION = {
    "depth": 32,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
}
PUBLISHED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "gemma3": (
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
        {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_seq_length": 256,
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 896, "width": 896},
        },
    ),
    "qwen2_vl": (
        _QWEN_TEXT,
        {**_QWEN_VISION, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584},
        {
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    ),
    "qwen2_5_vl": (
        _QWEN_TEXT,
        {
            **_QWEN_VISION,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
        {
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    ),
}
"""Text, tower and image processor, as files say it that were published."""


@pytest.mark.parametrize("stem", ["", "model."])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str, stem: str) -> None:
    text, tower, processor = PUBLISHED[name]
    spec, layout = outline_of_config({**text, "model_type": HF_SEEING[name]})
    # Gemma sets the text apart; Qwen's files did not, at first.
    config = {"text_config": text} if name == "gemma3" else dict(text)
    config |= {"model_type": name, "vision_config": tower}
    parts = ("vision_tower.vision_model.", "multi_modal_projector.") if name == "gemma3" else ("visual.",)
    stored = _Complete(stem + part for part in parts)
    frames = () if name == "gemma3" else (2,)
    shape = (1152 if name == "gemma3" else 1280, 3, *frames, 14, 14)
    spec, layout = with_vision(spec, layout, config, stored, lambda _: shape, lambda: processor)
    vision = spec.vision
    assert vision is not None
    assert layout.model[f"{TOWER}patch"].stored.startswith(f"{stem}{parts[0]}")
    if name == "gemma3":
        assert (vision.positions, vision.merge, vision.size.edge) == (4096, 4, 896)
        assert (
            layout.model[f"{TOWER}merge.out"].stored
            == f"{stem}multi_modal_projector.mm_input_projection_weight"
        )
    else:
        assert spec.ropes[0].axes == (0,) * 16 + (1,) * 24 + (2,) * 24
        assert (vision.hidden, vision.merge, vision.frames, vision.size.least_pixels) == (1280, 2, 2, 3136)
        assert (
            layout.model[f"{TOWER}layers.31.attention.qkv.bias"].stored
            == f"{stem}visual.blocks.31.attn.qkv.bias"
        )
    assert (name != "qwen2_5_vl") or (vision.window, vision.whole_layers) == (4, (7, 15, 23, 31))
