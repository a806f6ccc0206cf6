"""KV types: the number formats in which a session's keys and values can be kept, and what each costs.

The type is a model's, not a machine's: every stage of a chain rounds keys and values the same way, before anything
reads them, so tokens do not depend on where a model is cut or which machine goes on after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

KvType = Literal["float32", "float16", "int8"]
KV_TYPES: tuple[KvType, ...] = ("float32", "float16", "int8")
DEFAULT_KV_TYPE: KvType = "float32"
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "int8": 1}
_SCALE_BYTES = {"float32": 0, "float16": 0, "int8": 4}


@dataclass(frozen=True, slots=True)
class KvShape:
    """What is kept of a token in a layer: `parts` (keys and values; or rows that are both) of `heads` × `entries`."""

    heads: int
    entries: int
    parts: int = 2
    scaled: int = 0
    """In `int8`, so many neighbouring entries share a scale; 0: all of a head."""

    @property
    def grouped(self) -> tuple[int, int]:
        """How many groups of entries have a scale of their own, and their size."""
        size = self.scaled or self.entries
        return self.heads * self.entries // size, size


def latent_kv(rank: int, rotated: int) -> KvShape:
    """Latent attention keeps one row: a vector of `rank` entries and a rotated key. They differ in size by far, so no
    scale is shared by entries of both."""
    return KvShape(1, rank + rotated, parts=1, scaled=math.gcd(rank, rotated))


def kv_token_bytes(kv_type: KvType, shape: KvShape) -> int:
    """What is kept of one token in one layer."""
    groups, size = shape.grouped
    return shape.parts * groups * (size * _ELEMENT_BYTES[kv_type] + _SCALE_BYTES[kv_type])
