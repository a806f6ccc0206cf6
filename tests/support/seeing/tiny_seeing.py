"""Tiny random checkpoints that see, pictures for them, and what `transformers` computes with both.

Towers have several layers, windows and whole ones, every norm and bias random; a picture's rows are more than the
text's sliding windows see.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers
from numpy.typing import NDArray

from support.models.tiny import _SIZES, _quiet, _randomise, read_config

ROW_ID, BEGIN_ID, END_ID = 150, 151, 152
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_QWEN_IDS = {"image_token_id": ROW_ID, "vision_start_token_id": BEGIN_ID, "vision_end_token_id": END_ID}
LEAST_PIXELS, MOST_PIXELS = 28 * 28 * 4, 28 * 28 * 30
PIXELS = {"min_pixels": LEAST_PIXELS, "max_pixels": MOST_PIXELS}


def _make(kind: str, text: Mapping[str, Any], vision: Mapping[str, Any], **outer: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{kind}Config")
        return config(text_config={**_SIZES, **text}, vision_config=dict(vision), **outer)

    return make


SEEING_PICTURES: Mapping[str, Callable[[], Any]] = {
    "gemma3": _make(
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 112,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=16,
        image_token_index=ROW_ID,
        boi_token_index=BEGIN_ID,
        eoi_token_index=END_ID,
    ),
    "qwen2_vl": _make(
        "Qwen2VL",
        {"rope_parameters": _MROPE},
        {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
        **_QWEN_IDS,
    ),
    "qwen2_5_vl": _make(
        "Qwen2_5_VL",
        {"rope_parameters": _MROPE},
        {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **_QWEN_IDS,
    ),
}
"""By the type of the model."""


def save_seeing(name: str, folder: Path) -> Path:
    """A checkpoint in `folder`, the same in every run, with the settings of its image processor."""
    torch.manual_seed(sum(name.encode()))
    with _quiet():
        config = SEEING_PICTURES[name]()
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        _randomise(model)
        model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor(name).to_dict(), default=str))
    return folder


def pixels_of(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A picture with shapes in it, so that neighbouring pixels go together."""
    noise = np.random.default_rng(seed)
    down, right = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [np.sin(noise.uniform(2, 9) * down + noise.uniform(2, 9) * right + each) for each in range(3)]
    return np.asarray(np.stack(waves, axis=-1) * 110 + 128 + noise.uniform(-9, 9, (height, width, 3))).astype(
        np.uint8
    )


@cache
def _processor(name: str) -> Any:
    if name == "gemma3":
        return transformers.models.gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil(
            size={"height": 112, "width": 112}, do_pan_and_scan=False
        )
    return transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(**PIXELS)


def processed(name: str, pictures: Sequence[NDArray[np.uint8]]) -> dict[str, torch.Tensor]:
    """What the family's own image processor makes of pictures."""
    with _quiet():
        found = _processor(name)(list(pictures), return_tensors="pt", input_data_format="channels_last")
    return {key: torch.as_tensor(np.asarray(found[key])) for key in found if key != "num_crops"}


class Reference:
    """The model of `transformers` at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.name = read_config(folder)["model_type"]
        with _quiet():
            self._model = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()

    def features(self, inputs: Mapping[str, torch.Tensor]) -> NDArray[np.float32]:
        """Rows of all pictures, one behind the other."""
        with _quiet(), torch.no_grad():
            rows = self._model.get_image_features(**inputs).pooler_output
            rows = torch.cat(list(rows)) if not isinstance(rows, torch.Tensor) else rows.flatten(0, 1)
        return np.asarray(rows.numpy())

    def logits(self, ids: Sequence[int], inputs: Mapping[str, torch.Tensor]) -> NDArray[np.float32]:
        """`[len(ids), vocabulary]` of one forward over all of `ids`."""
        types = torch.tensor([[int(token == ROW_ID) for token in ids]])
        key = "token_type_ids" if self.name == "gemma3" else "mm_token_type_ids"
        with _quiet(), torch.no_grad():
            answer = self._model(torch.tensor([list(ids)]), **{key: types}, **inputs)
        return np.asarray(answer.logits[0].numpy())


@cache
def stored_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint as files have them, by their names."""
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModelForImageTextToText.from_config(
            SEEING_PICTURES[name](), dtype=torch.float32
        )
        model.save_pretrained(folder)
        stored = safetensors.numpy.load_file(Path(folder) / "model.safetensors")
    return {key: values.shape for key, values in stored.items()}
