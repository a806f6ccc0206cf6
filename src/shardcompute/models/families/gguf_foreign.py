"""GGUF files of any architecture: what a chain must know of a model that only llama.cpp can run.

Layers are told by the names of their tensors (`blk.3.…`), sizes by the keys that every architecture has. The spec says
how many layers, how wide and how long; nothing of ours can compute with it, which its family's name tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardcompute.core.errors import UnsupportedModelError
from shardcompute.models.families.fields import MAX_CONTEXT, MAX_LAYERS, Fields
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import Layer, ModelSpec

_FOREIGN = "gguf:"
_PROJECTOR = "clip"
"""The architecture of files with a tower, whatever model it is for."""
_WHERE = "GGUF metadata"
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EMBEDDING, _NORM, _HEAD = "token_embd.weight", "output_norm.weight", "output.weight"


def is_foreign(spec: ModelSpec) -> bool:
    """Whether only llama.cpp can run the model."""
    return spec.family.startswith(_FOREIGN)


def refuse_foreign(spec: ModelSpec) -> None:
    """UnsupportedModelError for a model that only llama.cpp can run."""
    if is_foreign(spec):
        raise UnsupportedModelError(
            f"only llama.cpp can run the architecture {spec.family.removeprefix(_FOREIGN)}",
            hint="use --backend llamacpp on every machine that computes",
        )


def refuse_projector(architecture: str) -> None:
    """UnsupportedModelError for the file of a tower alone, as llama.cpp has them beside models that see."""
    if architecture == _PROJECTOR:
        raise UnsupportedModelError(
            f"{_WHERE}: this is what a model sees with (mmproj), and no model",
            hint="serve Gemma 3, Qwen2-VL or Qwen2.5-VL from its original safetensors, which have their tower in them",
        )


def from_foreign_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[ModelSpec, Layout]:
    """Spec and layout of a decoder of any architecture. CorruptModelError for what cannot be true,
    UnsupportedModelError for a file that lacks what every decoder has."""
    architecture = Fields(metadata, _WHERE).text("general.architecture")[:64]
    refuse_projector(architecture)
    fields = Fields(metadata, _WHERE, f"{architecture}.")
    for name in (_EMBEDDING, _NORM):
        if name not in shapes:
            raise UnsupportedModelError(
                f"this {architecture} file has no {name} and is no language model that can be served"
            )
    layers = _layers(fields.integer("block_count", high=MAX_LAYERS), shapes, architecture)
    hidden = fields.integer("embedding_length")
    heads = _largest(metadata, f"{architecture}.attention.head_count", 1)
    head_dim = max(
        _largest(metadata, f"{architecture}.attention.{name}", hidden // heads)
        for name in ("key_length", "value_length")
    )
    spec = ModelSpec(
        family=f"{_FOREIGN}{architecture}",
        layers=(Layer(rope=None),) * len(layers),
        hidden=hidden,
        heads=heads,
        kv_heads=_largest(metadata, f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=_largest(metadata, f"{architecture}.feed_forward_length", hidden),
        vocab_size=shapes[_EMBEDDING][0],
        context_length=fields.integer("context_length", high=MAX_CONTEXT),
        ropes=(),
        norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
        tied_head=_HEAD not in shapes,
    )
    head = _HEAD if _HEAD in shapes else _EMBEDDING
    model = {"embedding": _EMBEDDING, "norm": _NORM, "head": head}
    return spec, Layout({ours: TensorPlace(name, shapes[name]) for ours, name in model.items()}, layers)


def _layers(
    count: int, shapes: Mapping[str, tuple[int, ...]], architecture: str
) -> tuple[dict[str, TensorPlace], ...]:
    layers: tuple[dict[str, TensorPlace], ...] = tuple({} for _ in range(count))
    for name, shape in shapes.items():
        match = _LAYER.fullmatch(name)
        if match is not None and int(match[1]) < count:
            layers[int(match[1])][match[2]] = TensorPlace(name, shape)
    if not layers or not all(layers):
        raise UnsupportedModelError(f"this {architecture} file does not hold the layers that it counts")
    return layers


def _largest(metadata: Mapping[str, Any], key: str, default: int) -> int:
    """A number, or the largest of those that layers have each."""
    value = metadata.get(key, default)
    numbers = value if isinstance(value, list) else [value]
    found = [number for number in numbers if isinstance(number, int) and 0 < number < 1 << 24]
    return max(found, default=max(1, default))
