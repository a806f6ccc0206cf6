"""Tensors in files: what lies where, and ranged reads that end in the matrix forms that kernels take.

A `TensorFile` says which tensors it holds (`entries`) and reads bytes of one of them, never more than asked.
The functions below turn rows of a tensor into a `Matrix` or a float32 vector. Rows cost exactly their own
bytes; columns are cut after reading, a piece at a time, because a read per row would be slow from disk and
hopeless from afar. Row and column ranges are `(start, stop)`, half-open; None means all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix, widen
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.bytes import ByteSource, LocalBytes, LocalPart
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS, BlockLayout
from shardcompute.weights.formats.mlx_blocks import mlx_layout

Span = tuple[int, int]

# File bytes, and weights, decoded at once: enough to keep numpy busy, little against the matrix itself. Types of one
# or two bits have many weights in few bytes.
_PIECE_BYTES = 8 << 20
_PIECE_WEIGHTS = 4 << 20

FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
# Beyond it a code times its scale may be infinite.
_LARGEST_SCALE = np.float32(2.0**119)
# Held as float32 where that loses nothing. Integers are no weights: what they stand for, nothing says.
_PLAIN_TYPES = FLOAT_TYPES | {"F64": np.dtype("<f8")}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: `shape` is outermost first (`[out, in]`), `offset` counts from the file start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one innermost row."""
        rows = math.prod(self.shape[:-1])
        return self.size_bytes // rows if rows else 0


class TensorFile(Protocol):
    """Named tensors, and some metadata, that can be read in parts."""

    @property
    def name(self) -> str: ...

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        """`length` bytes of tensor `name`, from its byte `offset` on."""
        ...

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        """The bytes of `[start, stop)` along the first axis of tensor `name`."""
        ...

    def close(self) -> None:
        """Close the sources that this file reads from."""
        ...


@runtime_checkable
class FoldedMatrices(Protocol):
    """A `TensorFile` some of whose matrices are made of several stored tensors (see `weights.quantised`)."""

    def read_folded(self, name: str, rows: Span, columns: Span) -> Matrix | None:
        """Rows, counted through stacked matrices, and columns of such a matrix; None where `name` is not one."""
        ...


@dataclass(frozen=True, slots=True)
class Strand:
    """Where bytes of a tensor begin: `offset` of the byte source called `file`. A tensor that lies in one piece has one
    strand, of unit 0; another is woven of units of its strands in turn."""

    file: str
    offset: int
    unit_bytes: int = 0


@runtime_checkable
class LocatedTensors(Protocol):
    """A `TensorFile` that knows in which byte sources its tensors lie."""

    def locate(self, name: str) -> tuple[Strand, ...]: ...


@runtime_checkable
class LastingTensors(Protocol):
    """A `TensorFile` some of whose tensors lie on this machine's disk, and can be read when it is closed."""

    def lasting(self, name: str) -> ByteSource | None:
        """The bytes of one of them; None where they are only to be had from here."""
        ...


def lasting_bytes(file: TensorFile, name: str) -> ByteSource | None:
    return file.lasting(name) if isinstance(file, LastingTensors) else None


class SingleTensorFile:
    """A `TensorFile` whose tensors all lie in one source; parsers make it, closing it closes the source."""

    def __init__(
        self, source: ByteSource, entries: Mapping[str, TensorEntry], metadata: Mapping[str, Any]
    ) -> None:
        self._source = source
        self.name = source.name
        self.entries = entries
        self.metadata = metadata

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        entry = find_entry(self, name)
        if offset < 0 or length < 0 or offset + length > entry.size_bytes:
            raise _wrong_range(self, entry, "bytes", (offset, offset + length), entry.size_bytes)
        return self._source.read(entry.offset + offset, length)

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        entry = find_entry(self, name)
        count = entry.shape[0] if entry.shape else 1
        first, last = _checked_span(self, entry, "rows", (start, count if stop is None else stop), count)
        step = entry.size_bytes // count if count else 0
        return self.read_bytes(name, first * step, (last - first) * step)

    def locate(self, name: str) -> tuple[Strand, ...]:
        return (Strand(self._source.name, find_entry(self, name).offset),)

    def lasting(self, name: str) -> ByteSource | None:
        if not isinstance(self._source, LocalBytes):
            return None
        entry = find_entry(self, name)
        return LocalPart(self._source.path, entry.offset, entry.size_bytes)

    def close(self) -> None:
        self._source.close()


def weave(parts: Sequence[memoryview], unit_bytes: Sequence[int]) -> memoryview:
    """Units of the parts in turn; each part has equally many."""
    units = [
        np.frombuffer(part, np.uint8).reshape(-1, size) for part, size in zip(parts, unit_bytes, strict=True)
    ]
    return np.concatenate(units, axis=1).reshape(-1).data


def block_layout(dtype: str) -> BlockLayout | None:
    """How blocks of a number type lie in a file; None for types that have none."""
    return BLOCK_LAYOUTS.get(dtype) or mlx_layout(dtype)


def find_entry(file: TensorFile, name: str) -> TensorEntry:
    """The entry of tensor `name`; `CorruptModelError` where the file has none."""
    try:
        return file.entries[name]
    except KeyError:
        raise CorruptModelError(
            f"{file.name} has no tensor {name!r}",
            hint="the configuration and the weights may belong to different models; fetch both again",
        ) from None


def read_matrix(file: TensorFile, name: str, rows: Span | None = None, columns: Span | None = None) -> Matrix:
    """A `[out, in]` tensor, or the part of it that the ranges name."""
    entry = _entry_with_rank(file, name, 2)
    return _read_part(file, entry, 0, rows, columns)


def read_expert_matrix(
    file: TensorFile, name: str, expert: int, rows: Span | None = None, columns: Span | None = None
) -> Matrix:
    """The matrix of one expert, or a part of it, from an `[experts, out, in]` tensor."""
    entry = _entry_with_rank(file, name, 3)
    _checked_span(file, entry, "experts", (expert, expert + 1), entry.shape[0])
    return _read_part(file, entry, expert * entry.shape[1], rows, columns)


def read_vector(file: TensorFile, name: str, start: int = 0, stop: int | None = None) -> Float32:
    """Elements `[start, stop)` of a one-dimensional tensor of plain numbers, as float32."""
    entry = _entry_with_rank(file, name, 1)
    dtype = _PLAIN_TYPES.get(entry.dtype)
    if dtype is None:
        raise _unsupported_type(file, entry)
    return widen(_as_float(file, entry, np.frombuffer(file.read_rows(name, start, stop), dtype)))


def read_flat(file: TensorFile, name: str) -> Float32:
    """All elements of a tensor of plain numbers, whatever axes it has, as float32."""
    entry = find_entry(file, name)
    dtype = _PLAIN_TYPES.get(entry.dtype)
    if dtype is None:
        raise _unsupported_type(file, entry)
    return widen(_as_float(file, entry, np.frombuffer(file.read_rows(name), dtype)))


def _read_part(
    file: TensorFile, entry: TensorEntry, first_row: int, rows: Span | None, columns: Span | None
) -> Matrix:
    height, width = entry.shape[-2:]
    start, stop = _checked_span(file, entry, "rows", rows or (0, height), height)
    columns = _checked_span(file, entry, "columns", columns or (0, width), width)
    rows = (first_row + start, first_row + stop)
    if isinstance(file, FoldedMatrices):
        folded = file.read_folded(entry.name, rows, columns)
        if folded is not None:
            return folded
    if entry.dtype in _PLAIN_TYPES:
        return _read_dense(file, entry, rows, columns)
    layout = block_layout(entry.dtype)
    if layout is None:
        raise _unsupported_type(file, entry)
    return _read_blocks(file, entry, layout, rows, columns)


def _read_dense(file: TensorFile, entry: TensorEntry, rows: Span, columns: Span) -> DenseMatrix:
    dtype, width, count = _PLAIN_TYPES[entry.dtype], entry.shape[-1], rows[1] - rows[0]
    if columns == (0, width) and entry.dtype in FLOAT_TYPES:
        raw = file.read_bytes(entry.name, rows[0] * entry.row_bytes, count * entry.row_bytes)
        return DenseMatrix(np.frombuffer(raw, dtype).reshape(count, width))
    held = dtype if entry.dtype in FLOAT_TYPES else np.dtype(np.float32)
    values = np.empty((count, columns[1] - columns[0]), held)
    for at, raw in _pieces(file, entry, rows):
        piece = _as_float(file, entry, np.frombuffer(raw, dtype).reshape(-1, width)[:, slice(*columns)])
        values[at : at + len(piece)] = piece
    return DenseMatrix(values)


def _as_float(file: TensorFile, entry: TensorEntry, values: Array) -> Array:
    """64-bit numbers as float32; UnsupportedModelError where that would round them."""
    if entry.dtype in FLOAT_TYPES:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.array_equal(narrow, values, equal_nan=True):
        raise UnsupportedModelError(
            f"{entry.name!r} in {file.name} holds {entry.dtype} numbers that float32 cannot hold exactly",
            hint="convert the model again, with weights of 32 bits or fewer",
        )
    return narrow


def _read_blocks(
    file: TensorFile, entry: TensorEntry, layout: BlockLayout, rows: Span, columns: Span
) -> BlockMatrix:
    size = layout.block_size
    if columns[0] % size or columns[1] % size:
        raise UnsupportedModelError(
            f"columns {columns[0]} to {columns[1]} of {entry.name!r} in {file.name} cut through its "
            f"{entry.dtype} blocks of {size}",
            hint="split this model over fewer tensor ranks, or use a 16-bit version of it",
        )
    blocks = slice(columns[0] // size, columns[1] // size)
    shape = (rows[1] - rows[0], blocks.stop - blocks.start)
    codes = np.empty((*shape, layout.code_bytes), np.uint8)
    scales = np.empty(shape, np.float32)
    shifts = np.empty(shape, np.float32) if layout.has_shifts else None
    for at, raw in _pieces(file, entry, rows):
        count = len(raw) // entry.row_bytes
        target = slice(at, at + count)
        with np.errstate(invalid="ignore"):  # damaged scales are refused below, by name
            piece = layout.decode(np.frombuffer(raw, np.uint8).reshape(-1, layout.file_bytes))
        codes[target] = piece[0].reshape(count, -1, layout.code_bytes)[:, blocks]
        scales[target] = _finite(file.name, entry, piece[1]).reshape(count, -1)[:, blocks]
        if shifts is not None and piece[2] is not None:
            shifts[target] = _finite(file.name, entry, piece[2]).reshape(count, -1)[:, blocks]
    return BlockMatrix(layout.bits, size, codes, scales, shifts)


def decode_rows(name: str, entry: TensorEntry, raw: NDArray[np.uint8]) -> Matrix:
    """Rows of a matrix from their bytes `[rows, row bytes]` in the file called `name`."""
    if entry.dtype in FLOAT_TYPES:
        return DenseMatrix(raw.view(FLOAT_TYPES[entry.dtype]))
    layout = BLOCK_LAYOUTS[entry.dtype]
    count = len(raw)
    with np.errstate(invalid="ignore"):
        codes, scales, shifts = layout.decode(raw.reshape(-1, layout.file_bytes))
    return BlockMatrix(
        layout.bits,
        layout.block_size,
        codes.reshape(count, -1, layout.code_bytes),
        _finite(name, entry, scales).reshape(count, -1),
        None if shifts is None else _finite(name, entry, shifts).reshape(count, -1),
    )


def _pieces(file: TensorFile, entry: TensorEntry, rows: Span) -> Iterator[tuple[int, memoryview]]:
    """Those rows in pieces of modest size, each with the index of its first row counted from `rows[0]`."""
    if not entry.row_bytes:
        return
    step = max(1, min(_PIECE_BYTES // entry.row_bytes, _PIECE_WEIGHTS // entry.shape[-1]))
    for first in range(rows[0], rows[1], step):
        count = min(step, rows[1] - first)
        yield first - rows[0], file.read_bytes(entry.name, first * entry.row_bytes, count * entry.row_bytes)


def _entry_with_rank(file: TensorFile, name: str, rank: int) -> TensorEntry:
    entry = find_entry(file, name)
    if len(entry.shape) != rank:
        raise CorruptModelError(
            f"{name!r} in {file.name} has shape {list(entry.shape)} where {rank} dimensions are needed",
            hint="the configuration and the weights may belong to different models; fetch both again",
        )
    return entry


def _checked_span(file: TensorFile, entry: TensorEntry, what: str, span: Span, limit: int) -> Span:
    if not 0 <= span[0] <= span[1] <= limit:
        raise _wrong_range(file, entry, what, span, limit)
    return span


def _wrong_range(
    file: TensorFile, entry: TensorEntry, what: str, span: Span, limit: int
) -> CorruptModelError:
    return CorruptModelError(
        f"{what} {span[0]} to {span[1]} of {entry.name!r} in {file.name} do not exist: it has {limit}",
        hint="the configuration and the weights may belong to different models; fetch both again",
    )


def _unsupported_type(file: TensorFile, entry: TensorEntry) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{entry.name!r} in {file.name} holds {entry.dtype} numbers, which cannot be run here",
        hint="choose a version of the model in a common type such as Q4_K_M, Q8_0 or BF16",
    )


def _finite(name: str, entry: TensorEntry, values: Array) -> Array:
    if not (np.abs(values) <= _LARGEST_SCALE).all():
        raise CorruptModelError(
            f"{entry.name!r} in {name} has block scales that are infinite, far too large or not numbers",
            hint="fetch the file again; it is damaged",
        )
    return values
