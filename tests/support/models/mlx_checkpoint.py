"""Checkpoints as MLX writes them, made without MLX: affine groups packed by numpy, experts stacked, config and all.

`quantise_folder` turns a tiny Hugging Face checkpoint into such a folder and, beside it, one with the same weights
dequantised, so that `transformers` can say what the quantised one must compute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from shardcompute.backends.matrix import Array, Float32

_EXPERT = re.compile(r"(.*)\.experts\.(gate_up_proj|down_proj)(_bias)?")
SCALE_TYPES: Mapping[str, Any] = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}


def quantise(
    weights: Float32, bits: int, group_size: int, scale_type: str = "F16"
) -> tuple[NDArray[np.uint32], Array, Array, Float32]:
    """Packed codes, scales, biases, and what they mean: `scale · q + bias` of every group."""
    groups = weights.reshape(*weights.shape[:-1], -1, group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    steps = (1 << bits) - 1
    scales = np.maximum((high - low) / steps, 1e-6).astype(SCALE_TYPES[scale_type])
    biases = low.astype(SCALE_TYPES[scale_type])
    wide, base = scales.astype(np.float32)[..., None], biases.astype(np.float32)[..., None]
    codes = np.clip(np.rint((groups - base) / wide), 0, steps).astype(np.uint8)
    meant = (codes * wide + base).astype(np.float32).reshape(weights.shape)
    return pack(codes.reshape(weights.shape), bits), scales, biases, meant


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes of the last axis as one stream of bits, lowest first, in words of 32."""
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")


def quantise_folder(
    source: Path,
    target: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    scale_type: str = "F16",
    overrides: Mapping[str, Mapping[str, int]] | None = None,
) -> tuple[Path, Path]:
    """The quantised folder, and one whose dense weights are what it means."""
    stored = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    quantised: dict[str, Array] = {}
    meant: dict[str, Array] = {}
    for name, values in stored.items():
        for module, weight, restore in _as_mlx_names(name, values, config["model_type"]):
            own = (overrides or {}).get(module, {"bits": bits, "group_size": group_size})
            if not name.endswith("_bias") and weight.ndim > 1 and weight.shape[-1] % own["group_size"] == 0:
                codes, scales, biases, dense = quantise(weight, own["bits"], own["group_size"], scale_type)
                quantised |= {
                    f"{module}.weight": codes,
                    f"{module}.scales": scales,
                    f"{module}.biases": biases,
                }
            else:
                dense = weight
                quantised[module + _suffix(name)] = weight
            restore(meant, dense)
    quantization = {"group_size": group_size, "bits": bits, "mode": "affine", **(overrides or {})}
    _write(
        target / "mlx",
        quantised,
        {**config, "quantization": quantization, "quantization_config": quantization},
    )
    _write(target / "dense", meant, config)
    return target / "mlx", target / "dense"


def _as_mlx_names(name: str, values: Array, model_type: str) -> list[tuple[str, Array, Any]]:
    """Modules as MLX names them, their weights, and how to put each back under its former name."""

    def whole(meant: dict[str, Array], dense: Array) -> None:
        meant[name] = dense

    found = _EXPERT.fullmatch(name)
    if found is None:
        return [(name.removesuffix(_suffix(name)), values, whole)]
    block, kind, bias = found.groups()
    holder = f"{block}.experts" if model_type == "gpt_oss" else f"{block}.switch_mlp"
    if model_type == "gpt_oss" and not bias:
        values = np.ascontiguousarray(values.swapaxes(-1, -2))  # [experts, in, out] there

    def put(meant: dict[str, Array], dense: Array, rows: slice) -> None:
        there = meant.setdefault(name, np.zeros(values.shape, values.dtype))
        there[:, rows] = dense
        if model_type == "gpt_oss" and not bias and rows in (slice(None), slice(1, None, 2)):
            meant[name] = np.ascontiguousarray(there.swapaxes(-1, -2))

    if kind == "down_proj":
        return [(f"{holder}.down_proj", values, lambda m, d: put(m, d, slice(None)))]
    half = values.shape[1] // 2
    is_interleaved = model_type == "gpt_oss"
    gate = slice(0, None, 2) if is_interleaved else slice(0, half)
    up = slice(1, None, 2) if is_interleaved else slice(half, None)
    return [
        (f"{holder}.gate_proj", np.ascontiguousarray(values[:, gate]), lambda m, d: put(m, d, gate)),
        (f"{holder}.up_proj", np.ascontiguousarray(values[:, up]), lambda m, d: put(m, d, up)),
    ]


def _suffix(name: str) -> str:
    if name.endswith(("_bias", ".bias")):
        return ".bias"
    return ".weight" if name.endswith(".weight") else ""


def _write(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file(
        {name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
