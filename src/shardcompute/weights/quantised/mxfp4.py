"""MXFP4 as gpt-oss is published: experts' matrices stacked, in four-bit floats with a power of two for 32 of them.

`x.gate_up_proj` lies in `x.gate_up_proj_blocks` (`[experts, out, groups, 16]` bytes) and `x.gate_up_proj_scales`
(`[experts, out, groups]`). The folded matrix keeps the name of its blocks, because it is `[experts, out, in]` where the
unquantised `gate_up_proj` of this family is stored transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardcompute.weights.quantised.four_bit_floats import Float4Parts, fold_float4
from shardcompute.weights.quantised.scheme import PartNames, Parts, QuantisedMatrix, Scheme


def mxfp4_scheme(_: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", (PartNames("_blocks", "_scales", ("_blocks",), _fold),))


def _fold(parts: Parts) -> QuantisedMatrix:
    codes, scales = parts.entry("_blocks"), parts.entry("_scales")
    if scales.dtype not in ("U8", "F8_E8M0"):
        raise parts.corrupt(f"has {scales.dtype} scales where powers of two in a byte are due")
    return fold_float4(parts, "MXFP4", Float4Parts(32, codes, scales))
