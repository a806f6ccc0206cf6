"""Checkpoints in the forms that quantisers publish, made by packers of our own from each form's definition.

`FORMS[name]` makes a weight into the tensors of a form and says what they mean; `quantise_folder` turns a tiny Hugging
Face checkpoint into such a folder and, beside it, one with the same weights dequantised, so that `transformers` can say
what the quantised one must compute.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from shardcompute.backends.matrix import Array, Float32

Stored = dict[str, tuple[str, Array]]
"""Tensors by name, each with what safetensors calls its type."""
Quantise = Callable[[str, Float32], tuple[Stored, Float32]]
"""By the name of a module and its weights: the tensors of it, and what they mean."""
_FP4 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NF4 = np.float32(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)
_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_MODULE = re.compile(r"model\.layers\.\d+\..*(proj|w1|w2|w3)")
_EXPERTS = re.compile(r"(.*\.experts\.(?:gate_up_proj|down_proj))")


def tensor(values: Array) -> tuple[str, Array]:
    return _TYPES[values.dtype.name], values


def save_tensors(path: Path, tensors: Stored) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [end, end + values.nbytes],
        }
        end += values.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


def pack_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Codes of the last axis in 32-bit words, lowest bits first."""
    per_word = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.uint32)
    return np.bitwise_or.reduce(grouped << np.arange(per_word, dtype=np.uint32) * bits, axis=-1).view(
        np.int32
    )


def affine(
    weights: Float32, bits: int, group: int, *, is_symmetric: bool, order: Array | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.uint8], Float32]:
    """Codes, scales and zeros `[out, groups]`, and what they mean; `order` is the group of each column."""
    groups = np.arange(weights.shape[1]) // group if order is None else order
    count, top = int(groups.max()) + 1, (1 << bits) - 1
    scales = np.empty((len(weights), count), np.float16)
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    for each in range(count):
        part = weights[:, groups == each]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        span = np.maximum(high, -low) * 2 if is_symmetric else high - low
        scales[:, each] = np.maximum(span / top, 1e-4)
        if not is_symmetric:
            zeros[:, each] = np.clip(np.rint(-low / scales[:, each].astype(np.float32)), 1, top)
    wide, base = scales.astype(np.float32)[:, groups], zeros.astype(np.float32)[:, groups]
    codes = np.clip(np.rint(weights / wide + base), 0, top).astype(np.uint8)
    return codes, scales, zeros, ((codes - base) * wide).astype(np.float32)


def _order(width: int, group: int) -> Array:
    """Groups of columns that do not lie together."""
    return (np.random.default_rng(width).permutation(width) // group).astype(np.int32)


def gptq(
    bits: int, group: int, *, is_symmetric: bool = True, is_ordered: bool = False, version: int = 1
) -> Quantise:
    def quantise(module: str, weights: Float32) -> tuple[Stored, Float32]:
        size = weights.shape[1] if group == -1 else group
        order = _order(weights.shape[1], size) if is_ordered else None
        codes, scales, zeros, meant = affine(weights, bits, size, is_symmetric=is_symmetric, order=order)
        index = np.arange(weights.shape[1], dtype=np.int32) // size if order is None else order
        return {
            f"{module}.qweight": tensor(np.ascontiguousarray(pack_words(codes, bits).T)),
            f"{module}.qzeros": tensor(pack_words(np.ascontiguousarray(zeros.T) - (version == 1), bits)),
            f"{module}.scales": tensor(np.ascontiguousarray(scales.T)),
            f"{module}.g_idx": tensor(index.astype(np.int32)),
        }, meant

    return quantise


def awq(group: int) -> Quantise:
    def pack(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
        ordered = codes.reshape(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack_words(ordered.reshape(codes.shape), 4)

    def quantise(module: str, weights: Float32) -> tuple[Stored, Float32]:
        codes, scales, zeros, meant = affine(weights, 4, group, is_symmetric=False)
        return {
            f"{module}.qweight": tensor(pack(np.ascontiguousarray(codes.T))),
            f"{module}.qzeros": tensor(pack(np.ascontiguousarray(zeros.T))),
            f"{module}.scales": tensor(np.ascontiguousarray(scales.T)),
        }, meant

    return quantise


def packed(bits: int, group: int, *, is_symmetric: bool = True, is_ordered: bool = False) -> Quantise:
    """compressed-tensors' `pack-quantized`."""

    def quantise(module: str, weights: Float32) -> tuple[Stored, Float32]:
        size = weights.shape[1] if group == -1 else group
        order = _order(weights.shape[1], size) if is_ordered else None
        codes, scales, zeros, meant = affine(weights, bits, size, is_symmetric=is_symmetric, order=order)
        found: Stored = {
            f"{module}.weight_packed": tensor(pack_words(codes, bits)),
            f"{module}.weight_scale": tensor(scales),
            f"{module}.weight_shape": tensor(np.int64(weights.shape)),
        }
        if not is_symmetric:
            words = np.ascontiguousarray(pack_words(np.ascontiguousarray(zeros.T), bits).T)
            found[f"{module}.weight_zero_point"] = tensor(words)
        if order is not None:
            found[f"{module}.weight_g_idx"] = tensor(order)
        return found, meant

    return quantise


def int8(module: str, weights: Float32) -> tuple[Stored, Float32]:
    """compressed-tensors' `int-quantized`: a scale for each row."""
    codes, scales, _, meant = affine(weights, 8, weights.shape[1], is_symmetric=True)
    return {
        f"{module}.weight": tensor((codes.astype(np.int16) - 128).astype(np.int8)),
        f"{module}.weight_scale": tensor(scales),
        f"{module}.input_scale": tensor(np.float32([0.5])),
    }, meant


def float8(end: str, tile: tuple[int, int] | None = None) -> Quantise:
    """Eight-bit floats with a scale for each tile, each row (`tile` is `(1, 0)`), or the whole matrix."""

    def quantise(module: str, weights: Float32) -> tuple[Stored, Float32]:
        height, width = weights.shape
        rows, columns = (tile[0], tile[1] or width) if tile else (height, width)
        spread = (np.arange(height)[:, None] // rows, np.arange(width)[None] // columns)
        grid = np.maximum.reduceat(np.abs(weights), np.arange(0, height, rows), axis=0)
        grid = np.maximum.reduceat(grid, np.arange(0, width, columns), axis=1) / np.float32(448)
        codes = (weights / grid[spread]).astype(ml_dtypes.float8_e4m3fn)
        meant = codes.astype(np.float32) * grid[spread]
        scales = grid if tile else np.float32(grid[0, 0])
        return {
            f"{module}.weight": tensor(codes),
            f"{module}.{end}": tensor(np.asarray(scales)),
            f"{module}.input_scale": tensor(np.float32([0.5])),
        }, meant

    return quantise


def mxfp8(module: str, weights: Float32) -> tuple[Stored, Float32]:
    """compressed-tensors' `mxfp8-quantized`: a power of two for 32 columns."""
    groups = weights.reshape(len(weights), -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(axis=-1) / 448))
    factor = np.exp2(exponents).astype(np.float32)[..., None]
    codes = (groups / factor).astype(ml_dtypes.float8_e4m3fn)
    return {
        f"{module}.weight": tensor(codes.reshape(weights.shape)),
        f"{module}.weight_scale": tensor((exponents + 127).astype(np.uint8)),
    }, (codes.astype(np.float32) * factor).reshape(weights.shape)


def float4_codes(values: Float32) -> NDArray[np.uint8]:
    """The nearest four-bit floats, two in a byte, the first in the low half."""
    nearest = np.abs(values[..., None] - _FP4).argmin(axis=-1).astype(np.uint8)
    return nearest[..., 0::2] | (nearest[..., 1::2] << np.uint8(4))


def mxfp4(weights: Float32) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Float32]:
    """Codes `[…, groups, 16]`, exponents `[…, groups]` and what they mean, for groups of 32 of the last axis."""
    groups = weights.reshape(*weights.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
    factor = np.exp2(exponents).astype(np.float32)[..., None]
    codes = float4_codes(groups / factor)
    meant = _FP4[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(groups.shape) * factor
    return codes, (exponents + 127).astype(np.uint8), meant.reshape(weights.shape)


def nvfp4(*, is_modelopt: bool) -> Quantise:
    def quantise(module: str, weights: Float32) -> tuple[Stored, Float32]:
        groups = weights.reshape(len(weights), -1, 16)
        factor = np.float32(448 * 6) / np.abs(weights).max()
        scales = (np.abs(groups).max(axis=-1) / 6 * factor).astype(ml_dtypes.float8_e4m3fn)
        stored = np.float32(1) / factor if is_modelopt else factor
        wide = scales.astype(np.float32) * stored if is_modelopt else scales.astype(np.float32) / stored
        codes = float4_codes(groups / np.maximum(wide, 1e-9)[..., None])
        meant = _FP4[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(groups.shape) * wide[..., None]
        flat = codes.reshape(len(weights), -1)
        names = ("weight", "weight_scale_2") if is_modelopt else ("weight_packed", "weight_global_scale")
        return {
            f"{module}.{names[0]}": tensor(flat),
            f"{module}.weight_scale": tensor(scales),
            f"{module}.{names[1]}": tensor(np.asarray(stored) if is_modelopt else stored.reshape(1)),
        }, meant.reshape(weights.shape).astype(np.float32)

    return quantise


def mxfp4_packed(module: str, weights: Float32) -> tuple[Stored, Float32]:
    """compressed-tensors' `mxfp4-pack-quantized`."""
    codes, exponents, meant = mxfp4(weights)
    return {
        f"{module}.weight_packed": tensor(codes.reshape(len(weights), -1)),
        f"{module}.weight_scale": tensor(exponents),
    }, meant


def four_bit_table(kind: str, *, is_nested: bool) -> Quantise:
    """bitsandbytes in 4 bits: nf4 or fp4, with maxima that are codes themselves or not."""
    table = _NF4
    if kind == "fp4":
        steps = np.float32([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
        table = np.concatenate([steps, -steps]).astype(np.float32)

    def quantise(module: str, weights: Float32) -> tuple[Stored, Float32]:
        blocks = weights.reshape(-1, 64)
        absmax = np.abs(blocks).max(axis=1).astype(np.float32)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32"}
        state["shape"] = list(weights.shape)
        found: Stored = {f"{module}.weight.quant_map": tensor(table)}
        if is_nested:
            offset = np.float32(absmax.mean())
            levels = np.linspace(-1, 1, 256).astype(np.float32)
            padded = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
            outer = np.abs(padded).max(axis=1).astype(np.float32)
            codes = np.abs((padded / outer[:, None])[..., None] - levels).argmin(axis=-1).astype(np.uint8)
            codes = codes.reshape(-1)[: len(absmax)]
            absmax = levels[codes] * np.repeat(outer, 256)[: len(codes)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
            found[f"{module}.weight.absmax"] = tensor(codes)
            found[f"{module}.weight.nested_absmax"] = tensor(outer)
            found[f"{module}.weight.nested_quant_map"] = tensor(levels)
        else:
            found[f"{module}.weight.absmax"] = tensor(absmax)
        nearest = np.abs((blocks / absmax[:, None])[..., None] - table).argmin(axis=-1).astype(np.uint8)
        meant = table[nearest] * absmax[:, None]
        flat = nearest.reshape(-1)
        found[f"{module}.weight"] = tensor(((flat[0::2] << np.uint8(4)) | flat[1::2])[:, None])
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        found[f"{module}.weight.quant_state.bitsandbytes__{kind}"] = tensor(text)
        return found, meant.reshape(weights.shape).astype(np.float32)

    return quantise


def bnb_int8(module: str, weights: Float32) -> tuple[Stored, Float32]:
    rows = np.abs(weights).max(axis=1).astype(np.float32)
    codes = np.rint(weights * (127 / rows)[:, None]).astype(np.int8)
    return {
        f"{module}.weight": tensor(codes),
        f"{module}.SCB": tensor(rows),
        f"{module}.weight_format": tensor(np.zeros((), np.uint8)),
    }, (codes.astype(np.float32) * (rows / np.float32(127))[:, None]).astype(np.float32)


def _groups(**weights: Any) -> dict[str, Any]:
    return {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights},
            "input_activations": None,
        }
    }


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": _groups(**weights),
    }


def _gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


@dataclass(frozen=True, slots=True)
class Form:
    """One published form: how it is made and what `quantization_config` says of it."""

    quantise: Quantise
    config: Mapping[str, Any] = field(default_factory=dict)


FORMS: Mapping[str, Form] = {
    "gptq4": Form(gptq(4, 32), _gptq(4, 32)),
    "gptq8": Form(gptq(8, 32), _gptq(8, 32)),
    "gptq4-rows": Form(gptq(4, -1), _gptq(4, -1)),
    "gptq4-asymmetric": Form(gptq(4, 32, is_symmetric=False), _gptq(4, 32, sym=False)),
    "gptq4-ordered": Form(gptq(4, 32, is_ordered=True), _gptq(4, 32, desc_act=True)),
    "gptq4-v2": Form(
        gptq(4, 32, is_symmetric=False, version=2), _gptq(4, 32, sym=False, checkpoint_format="gptq_v2")
    ),
    "gptq2": Form(gptq(2, 32, is_symmetric=False), _gptq(2, 32, sym=False)),
    "awq": Form(
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "int4": Form(packed(4, 32), _compressed("pack-quantized", group_size=32, strategy="group")),
    "int4-asymmetric": Form(
        packed(4, 32, is_symmetric=False),
        _compressed("pack-quantized", group_size=32, strategy="group", symmetric=False),
    ),
    "int4-ordered": Form(
        packed(4, 32, is_ordered=True),
        _compressed("pack-quantized", group_size=32, strategy="group", actorder="group"),
    ),
    "int8-packed": Form(packed(8, -1), _compressed("pack-quantized", num_bits=8, strategy="channel")),
    "int8": Form(int8, _compressed("int-quantized", num_bits=8, strategy="channel")),
    "fp8-rows": Form(
        float8("weight_scale", (1, 0)),
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "mxfp8": Form(
        mxfp8,
        _compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
    ),
    "fp8-blocks": Form(
        float8("weight_scale_inv", (24, 40)),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40], "activation_scheme": "dynamic"},
    ),
    "fp8-tensor": Form(float8("weight_scale"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm-fp8": Form(float8("weight_scale", (1, 0)), {"quant_method": "fbgemm_fp8"}),
    "nvfp4": Form(
        nvfp4(is_modelopt=False),
        _compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
    ),
    "mxfp4-packed": Form(
        mxfp4_packed, _compressed("mxfp4-pack-quantized", type="float", strategy="group", group_size=32)
    ),
    "modelopt-fp8": Form(float8("weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-nvfp4": Form(nvfp4(is_modelopt=True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nf4": Form(four_bit_table("nf4", is_nested=False), {"load_in_4bit": True}),
    "nf4-nested": Form(
        four_bit_table("nf4", is_nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ),
    "fp4": Form(
        four_bit_table("fp4", is_nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ),
    "bnb-int8": Form(bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def quantise_folder(source: Path, target: Path, form: str) -> tuple[Path, Path]:
    """The quantised folder, and one whose dense weights are what it means."""
    stored: dict[str, Array] = load_file(source / "model.safetensors")
    if form != "mxfp4":
        quantised, meant = quantise_with(FORMS[form], stored)
        stored = {}
    else:
        quantised, meant = {}, {}
    for name, values in stored.items():
        if _EXPERTS.fullmatch(name):
            codes, scales, dense = mxfp4(np.ascontiguousarray(values.swapaxes(-1, -2)))
            quantised |= {f"{name}_blocks": tensor(codes), f"{name}_scales": tensor(scales)}
            meant[name] = np.ascontiguousarray(dense.swapaxes(-1, -2))
        else:
            quantised[name], meant[name] = tensor(values), values
    config = json.loads((source / "config.json").read_text())
    said = {"quant_method": "mxfp4"} if form == "mxfp4" else FORMS[form].config
    _write(target / form, quantised, {**config, "quantization_config": said})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, target / form)
    _write(target / f"{form}-dense", {name: tensor(values) for name, values in meant.items()}, config)
    return target / form, target / f"{form}-dense"


def quantise_with(form: Form, stored: Mapping[str, Array]) -> tuple[Stored, dict[str, Array]]:
    """The tensors of a model whose matrices take a form, and what they mean."""
    quantised: Stored = {}
    meant: dict[str, Array] = {}
    for name, values in stored.items():
        module = name.removesuffix(".weight")
        if _MODULE.fullmatch(module) and values.ndim == 2:
            parts, meant[name] = form.quantise(module, values)
            quantised |= parts
        else:
            quantised[name], meant[name] = tensor(values), values
    return quantised, meant


def _write(folder: Path, tensors: Stored, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
