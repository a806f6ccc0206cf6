"""ModelOpt: NVIDIA's own FP8 and NVFP4 checkpoints.

FP8 has a scale for the whole of `m.weight` in `m.weight_scale`. NVFP4 has packed four-bit floats in `m.weight`,
scales of 16 columns in `m.weight_scale`, and one factor for all in `m.weight_scale_2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardcompute.core.errors import UnsupportedModelError
from shardcompute.weights.quantised.floats import ACTIVATION_NOTE, ACTIVATION_SCALES, fold_float8
from shardcompute.weights.quantised.four_bit_floats import Float4Parts, fold_float4
from shardcompute.weights.quantised.scheme import PartNames, Parts, QuantisedMatrix, Scheme

_ALGORITHMS = ("FP8", "NVFP4")


def modelopt_scheme(config: Mapping[str, Any]) -> Scheme:
    inner = config.get("quantization")
    algorithm = config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, dict) else None)
    if algorithm not in _ALGORITHMS:
        raise UnsupportedModelError(
            f"config.json: ModelOpt's algorithm {str(algorithm)[:32]!r} cannot be run here",
            hint=f"use a version in {' or '.join(_ALGORITHMS)}, or a GGUF file",
        )
    names = PartNames(".weight", ".weight_scale", (".weight", ".weight_scale_2"), _fold)
    return Scheme("modelopt", (names,), ACTIVATION_SCALES, note=ACTIVATION_NOTE)


def _fold(parts: Parts) -> QuantisedMatrix:
    codes, scales = parts.entry(".weight"), parts.entry(".weight_scale")
    if ".weight_scale_2" not in parts:
        return fold_float8(parts, ".weight", {".weight_scale"}, None)
    where = Float4Parts(16, codes, scales, parts.entry(".weight_scale_2"))
    return fold_float4(parts, "NVFP4", where)
