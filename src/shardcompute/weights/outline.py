"""Outline of a model that nobody has fetched: a checkpoint without weights, from what the catalogue says of it.

Shapes follow from the config's fields, number types from how files of that kind are written (`RECIPES`). It can be
sized up and described; reading weights of it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from shardcompute.core.errors import UnknownModelError
from shardcompute.models.families import outline_of_config
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import ModelSpec
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.formats.tensor_file import TensorEntry, block_layout
from shardcompute.weights.sources.catalogue import KnownModel
from shardcompute.weights.sources.reference import EmbeddedReference, HubReference, parse_reference
from shardcompute.weights.sources.resolve import ModelFiles
from shardcompute.weights.sources.wheel import SMOLLM2

_ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
_WIDE_BLOCK = 256
_NARROWER = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What llama.cpp takes for rows that blocks of 256 do not divide."""

Recipe = Callable[[ModelSpec, int | None, str], str]
"""The number type of a matrix, by its layer (None: of the whole model) and our name for it."""


def _mostly_q4_k(spec: ModelSpec, layer: int | None, name: str) -> str:
    """`Q4_K_M` as llama.cpp's `quantize` makes it: some values and downs, and the head, in 6 bits."""
    if layer is None:
        return "Q6_K" if name == "head" or spec.tied_head else "Q4_K"
    if name == "mlp.router":
        return "F32"
    count = spec.layer_count
    has_more = layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
    if spec.family == "phi3" and name in ("attention.q", "attention.k", "attention.v"):
        return "Q5_K"  # one matrix of all three
    return "Q6_K" if has_more and name.endswith(("attention.v", ".down")) else "Q4_K"


def _experts_in_mxfp4(spec: ModelSpec, layer: int | None, name: str) -> str:
    if name == "mlp.router":
        return "F32"
    return "MXFP4" if name.startswith("experts.") else "Q8_0"


def _layers_in_fp8(spec: ModelSpec, layer: int | None, name: str) -> str:
    return "BF16" if layer is None or name == "mlp.router" else "F8_E4M3"


def _small_q4_1(spec: ModelSpec, layer: int | None, name: str) -> str:
    """As the embedded model is packaged."""
    return "Q8_0" if layer is None else "Q4_1"


def _all_in(dtype: str) -> Recipe:
    return lambda spec, layer, name: dtype


RECIPES: Mapping[str, Recipe] = {
    "BF16": _all_in("BF16"),
    "FP8": _layers_in_fp8,
    "MXFP4": _experts_in_mxfp4,
    "Q4_1": _small_q4_1,
    "Q4_K_M": _mostly_q4_k,
    "Q8_0": _all_in("Q8_0"),
}


class TensorOutline:
    """A `TensorFile` that has entries alone."""

    def __init__(self, name: str, entries: Mapping[str, TensorEntry]) -> None:
        self.name = name
        self.entries = entries
        self.metadata: Mapping[str, Any] = {}

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        self._refuse()

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        self._refuse()

    def close(self) -> None:
        """Nothing is open."""

    def _refuse(self) -> NoReturn:
        raise UnknownModelError(
            f"{self.name} is not on this machine", hint=f"fetch it first: shardcompute pull {self.name}"
        )


def outline(known: KnownModel) -> Checkpoint:
    """What a model's headers would say, as far as sizes and shapes go."""
    spec, layout = outline_of_config(known.config)
    reference = parse_reference(known.full_name)
    assert isinstance(reference, (EmbeddedReference, HubReference))
    name = reference.repo if isinstance(reference, HubReference) else SMOLLM2.name
    files = ModelFiles(
        reference=reference,
        name=name,
        kind="safetensors" if known.weights in ("BF16", "FP8") else "gguf",
        main_file="",
        weight_files=(),
        files={},
        total_bytes=known.file_bytes,
    )
    entries = _entries(spec, layout, RECIPES[known.weights])
    return Checkpoint(name, spec, layout, TensorOutline(str(reference), entries), files, known.config)


def _entries(spec: ModelSpec, layout: Layout, recipe: Recipe) -> dict[str, TensorEntry]:
    parts = [(None, layout.model), *enumerate(layout.layers)]
    return {
        place.stored: _entry(place, recipe(spec, layer, name))
        for layer, part in parts
        for name, place in part.items()
    }


def _entry(place: TensorPlace, dtype: str) -> TensorEntry:
    if len(place.shape) == 1:
        dtype = "F32"
    elif place.shape[-1] % _WIDE_BLOCK:
        dtype = _NARROWER.get(dtype, dtype)
    count, blocks = math.prod(place.shape), block_layout(dtype)
    size = count * _ELEMENT_BYTES[dtype] if blocks is None else count // blocks.file_block * blocks.file_bytes
    return TensorEntry(place.stored, dtype, place.shape, 0, size)
