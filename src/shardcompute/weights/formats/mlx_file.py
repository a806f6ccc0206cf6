"""Checkpoints that MLX has quantised, read as if each matrix were one tensor of blocks.

MLX stores a matrix as three tensors: `m.weight` (uint32 words of packed codes), `m.scales` and `m.biases`; its config
says by how many bits and in groups of what size, for all and for single matrices. What is not quantised lies beside
them as it is. `MlxTensorFile` shows one entry `m.weight` of the matrix's true shape, whose bytes are made of all three
when they are read; everything behind it (slices, cards, travelling) needs to know nothing of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.mlx_blocks import MLX_BITS, MLX_GROUPS, MLX_SCALES, mlx_layout, mlx_type
from shardcompute.weights.formats.tensor_file import (
    LocatedTensors,
    Strand,
    TensorEntry,
    TensorFile,
    find_entry,
    weave,
)

_KEYS = ("quantization", "quantization_config")


@dataclass(frozen=True, slots=True)
class MlxGroups:
    """Bits and group size of one matrix, or of all."""

    bits: int
    group_size: int


def without_mlx(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """A config without what MLX has written about quantisation, and that; None where there is none."""
    for key in _KEYS:
        found = config.get(key)
        if isinstance(found, dict) and "quant_method" not in found and {"bits", "group_size"} <= found.keys():
            return {name: value for name, value in config.items() if name not in _KEYS}, found
    return config, None


def open_mlx(file: TensorFile, quantization: Mapping[str, Any]) -> MlxTensorFile:
    """The tensors of `file`, quantised as `quantization` says."""
    overrides = {name: _groups(value) for name, value in quantization.items() if isinstance(value, dict)}
    return MlxTensorFile(file, _groups(quantization), overrides)


def _groups(values: Mapping[str, Any]) -> MlxGroups:
    mode = values.get("mode", "affine")
    if mode != "affine":
        raise UnsupportedModelError(
            f"config.json: the weights are quantised by MLX's mode {str(mode)[:64]!r}, which cannot be run here",
            hint="use a version of the model in affine groups (4bit, 8bit, DWQ), or a GGUF file",
        )
    bits, group_size = values.get("bits"), values.get("group_size")
    if (
        type(bits) is not int
        or bits not in MLX_BITS
        or type(group_size) is not int
        or group_size not in MLX_GROUPS
    ):
        raise UnsupportedModelError(
            f"config.json: weights of {str(bits)[:16]} bits in groups of {str(group_size)[:16]} cannot be run here",
            hint=f"supported: {', '.join(map(str, MLX_BITS))} bits in groups of {', '.join(map(str, MLX_GROUPS))}",
        )
    return MlxGroups(bits, group_size)


class MlxTensorFile:
    """A `TensorFile` that shows the three tensors of a quantised matrix as one."""

    def __init__(self, file: TensorFile, groups: MlxGroups, overrides: Mapping[str, MlxGroups]) -> None:
        self._file = file
        self._groups = groups
        self._overrides = overrides
        self.name = file.name
        self.metadata = file.metadata
        self.entries: Mapping[str, TensorEntry] = _FoldedEntries(self, file.entries)

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        if not self.is_folded(name):
            return self._file.read_bytes(name, offset, length)
        entry = find_entry(self, name)
        if offset < 0 or length < 0 or offset + length > entry.size_bytes:
            raise CorruptModelError(
                f"bytes {offset} to {offset + length} of {name!r} in {self.name} do not exist",
                hint="the configuration and the weights may belong to different models; fetch both again",
            )
        sizes = _unit_sizes(entry.dtype)
        first, last = offset // sum(sizes), -(-(offset + length) // sum(sizes))
        parts = [
            self._file.read_bytes(part, first * size, (last - first) * size)
            for part, size in zip(_parts(name), sizes, strict=True)
        ]
        start = offset - first * sum(sizes)
        return weave(parts, sizes)[start : start + length]

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        if not self.is_folded(name):
            return self._file.read_rows(name, start, stop)
        entry = find_entry(self, name)
        step = entry.size_bytes // entry.shape[0]
        stop = entry.shape[0] if stop is None else stop
        return self.read_bytes(name, start * step, (stop - start) * step)

    def locate(self, name: str) -> tuple[Strand, ...]:
        assert isinstance(self._file, LocatedTensors)
        if not self.is_folded(name):
            return self._file.locate(name)
        (codes,), (scales,), (biases,) = (self._file.locate(part) for part in _parts(name))
        sizes = _unit_sizes(self.entries[name].dtype)
        parts = zip((codes, scales, biases), sizes, strict=True)
        return tuple(Strand(part.file, part.offset, size) for part, size in parts)

    def is_folded(self, name: str) -> bool:
        return all(part in self._file.entries for part in _parts(name)[1:])

    def fold(self, name: str) -> TensorEntry:
        """The one entry of a quantised matrix, whose parts agree with each other and with the config."""
        codes, scales, biases = (find_entry(self._file, part) for part in _parts(name))
        groups = self._overrides.get(name.removesuffix(".weight"), self._groups)
        is_whole = len(codes.shape) in (2, 3) and scales.shape == biases.shape
        width = scales.shape[-1] * groups.group_size if scales.shape else 0
        if (
            not is_whole
            or codes.dtype != "U32"
            or scales.dtype not in MLX_SCALES
            or scales.dtype != biases.dtype
            or codes.shape != (*scales.shape[:-1], width * groups.bits // 32)
        ):
            raise CorruptModelError(
                f"{name!r} in {self.name} has codes, scales and biases that do not make a matrix of "
                f"{groups.bits} bits in groups of {groups.group_size}",
                hint="the configuration and the weights may belong to different models; fetch both again",
            )
        shape = (*codes.shape[:-1], width)
        dtype = mlx_type(groups.bits, groups.group_size, scales.dtype)
        layout = mlx_layout(dtype)
        assert layout is not None
        size = math.prod(shape) // layout.file_block * layout.file_bytes
        return TensorEntry(name, dtype, shape, 0, size)

    def close(self) -> None:
        self._file.close()


class _FoldedEntries(Mapping[str, TensorEntry]):
    """Entries without those that are folded into others; reading one may open the shard it lies in."""

    def __init__(self, file: MlxTensorFile, stored: Mapping[str, TensorEntry]) -> None:
        self._file = file
        self._stored = stored
        self._names = [name for name in stored if not self._is_part(name)]
        self._known = frozenset(self._names)

    def __getitem__(self, name: str) -> TensorEntry:
        if name not in self._known:
            raise KeyError(name)
        return self._file.fold(name) if self._file.is_folded(name) else self._stored[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _is_part(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        return kind in ("scales", "biases") and f"{module}.weight" in self._stored


def _unit_sizes(dtype: str) -> tuple[int, int, int]:
    """What a group takes of codes, scales and biases."""
    layout = mlx_layout(dtype)
    assert layout is not None
    scale_bytes = MLX_SCALES[dtype.rsplit("_", 1)[1]]
    return layout.file_bytes - 2 * scale_bytes, scale_bytes, scale_bytes


def _parts(name: str) -> tuple[str, str, str]:
    """The tensors that make the matrix `name`, which ends in `.weight`."""
    module = name.removesuffix(".weight")
    return name, f"{module}.scales", f"{module}.biases"
