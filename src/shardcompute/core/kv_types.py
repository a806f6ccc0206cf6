"""KV types: the number formats in which a session's keys and values can be kept, and what each costs.

The type is a model's, not a machine's: every stage of a chain rounds keys and values the same way, before anything
reads them, so tokens do not depend on where a model is cut or which machine goes on after another.
"""

from __future__ import annotations

from typing import Literal

KvType = Literal["float32", "float16", "int8"]
KV_TYPES: tuple[KvType, ...] = ("float32", "float16", "int8")
DEFAULT_KV_TYPE: KvType = "float32"
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "int8": 1}
_SCALE_BYTES = {"float32": 0, "float16": 0, "int8": 4}


def kv_token_bytes(kv_type: KvType, kv_heads: int, head_dim: int) -> int:
    """Keys and values of one token in one layer; `int8` has a scale for each head's key and each head's value."""
    return 2 * kv_heads * (head_dim * _ELEMENT_BYTES[kv_type] + _SCALE_BYTES[kv_type])
