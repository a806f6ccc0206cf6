"""Parts of an adapter: which tensors each adapted map learns, by kind, what they are called and begin with.

LoRA's and DoRA's names are those of PEFT's files. PEFT has no bottleneck adapters; their names are ours.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from shardcompute.backends.matrix import Float32

if TYPE_CHECKING:
    from shardcompute.finetune.modules import AdaptedMap
    from shardcompute.finetune.plan import LoraShape

Shape = tuple[int, ...]
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
NECK_DOWN, NECK_DOWN_BIAS = "bottleneck_down.weight", "bottleneck_down.bias"
NECK_UP, NECK_UP_BIAS = "bottleneck_up.weight", "bottleneck_up.bias"
BOTTLENECK_MAPS = ("attention.out", "mlp.down")
"""A bottleneck takes what a block answers, so that it comes behind the last map of each."""


def part_shapes(adapted: AdaptedMap, lora: LoraShape) -> Mapping[str, Shape]:
    """The tensors that a map learns, in the order in which they lie in a stage's vector."""
    rank, out, into = lora.rank, adapted.module.width_out, adapted.module.width_in
    if lora.kind == "bottleneck":
        return {
            NECK_DOWN: (rank, out),
            NECK_DOWN_BIAS: (rank,),
            NECK_UP: (out, rank),
            NECK_UP_BIAS: (out,),
        }
    low_rank: dict[str, Shape] = {DOWN: (rank, into), UP: (out, rank)}
    return low_rank | {MAGNITUDE: (out,)} if lora.kind == "dora" else low_rank


def count_parameters(adapted: AdaptedMap, lora: LoraShape) -> int:
    return sum(math.prod(shape) for shape in part_shapes(adapted, lora).values())


def first_numbers(adapted: AdaptedMap, lora: LoraShape, seed: int) -> dict[str, Float32]:
    """What they are before the first step: small chance, keyed by the map, in the part that comes first, and nothing in
    others, so that the model is the base. Lengths of rows are the base's: whoever has its weights fills them in."""
    shapes = part_shapes(adapted, lora)
    found = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    first = next(iter(shapes))
    chance = np.random.default_rng([seed, adapted.layer, zlib.crc32(adapted.tail.encode())])
    bound = 1 / np.sqrt(shapes[first][1])
    found[first] = chance.uniform(-bound, bound, shapes[first]).astype(np.float32)
    return found
