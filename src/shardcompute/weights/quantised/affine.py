"""Groups of integers turned into the blocks our kernels take, without a second rounding.

GPTQ, AWQ and compressed-tensors all mean `w = scale · (code − zero)`, with a scale and a zero for a row's group of
input columns. A group that blocks of 32 (or 16) divide becomes such blocks, which repeats scales and rounds nothing:
scales have 16 bits, so that `shift = scale · (half − zero)` and every weight are exact in float32. Codes of up to 4
bits are held in 4, others in 8. Groups whose columns do not lie together (activation order), or that blocks do not
divide, are widened to float32, which is exact as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.footprint import FLOAT32, MatrixForm
from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.weights.formats.tensor_file import Span
from shardcompute.weights.quantised.scheme import Parts

Codes = NDArray[np.uint8]
BLOCK_SIZES = (32, 16)
MAX_WIDTH = 1 << 20
# Weights made at once: enough to keep numpy busy, little against the matrix itself.
PIECE_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Groups:
    """How the columns of a matrix are grouped: `order` says which group each column belongs to, where that is not
    simply the next `size` columns."""

    bits: int
    width: int
    size: int
    order: NDArray[np.int64] | None = None

    @property
    def count(self) -> int:
        return -(-self.width // self.size)

    @property
    def held_bits(self) -> int:
        return 4 if self.bits <= 4 else 8

    @property
    def block_size(self) -> int | None:
        """Of the blocks that hold these groups, None where none do."""
        if self.order is not None:
            return None
        is_one = self.size >= self.width
        return next(
            (size for size in BLOCK_SIZES if self.width % size == 0 and (is_one or self.size % size == 0)),
            None,
        )

    def form(self, *, has_shifts: bool) -> MatrixForm:
        size = self.block_size
        return FLOAT32 if size is None else MatrixForm(self.held_bits, size, has_shifts)


def configured_size(value: Any) -> int | None:
    """The group size that a config gives; None for whole rows (-1 or nothing)."""
    if value is None or value == -1:
        return None
    if type(value) is not int or not 0 < value <= MAX_WIDTH:
        raise UnsupportedModelError(
            f"config.json: a group_size of {str(value)[:24]} is none that weights can have",
            hint="sizes are whole numbers such as 32, 64 or 128, or -1 for whole rows; fetch the model again",
        )
    return value


def group_size(parts: Parts, width: int, count: int, configured: int | None) -> int:
    """How many columns a group has where a row of `width` has `count`: what the config says, where that fits."""
    size = configured or width
    if -(-width // size) == count:
        return size
    if count and width % count == 0:
        return width // count
    raise parts.corrupt(f"has {count} groups in a row of {width} where they should be of {size}")


def checked_order(parts: Parts, order: Array, groups: Groups) -> Array | None:
    """`order` with every group in range; None where it says nothing. All −1 means that there is none."""
    order = order.astype(np.int64)
    if bool((order == -1).all()):
        return None
    if order.min() < 0 or order.max() >= groups.count:
        wrong = order.min() if order.min() < 0 else order.max()
        raise parts.corrupt(f"has a g_idx that names group {wrong} of {groups.count}")
    return None if np.array_equal(order, np.arange(groups.width) // groups.size) else order


@dataclass(frozen=True, slots=True)
class AffineRows:
    """Some rows: `codes` held as `hold` does, `scales` and `zeros` `[rows, groups]`; no zeros: half of the range."""

    codes: Codes
    scales: Float32
    zeros: Float32 | None


ReadRows = Callable[[int, int], AffineRows]


def affine_matrix(groups: Groups, rows: Span, columns: Span, read: ReadRows, name: str) -> Matrix:
    """Rows and columns of a matrix, made of what `read(start, stop)` gives piece by piece."""
    if groups.block_size is None:
        return _dense(groups, rows, columns, read)
    return _blocks(groups, groups.block_size, rows, columns, read, name)


def hold(codes: Codes, bits: int) -> Codes:
    """Codes `[rows, width]` of `bits` centred in 4 or 8, two of 4 in a byte, the lower index in the low half."""
    held = 4 if bits <= 4 else 8
    codes = codes + np.uint8((1 << (held - 1)) - (1 << (bits - 1)))
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4)) if held == 4 else codes


def pieces(rows: Span, width: int) -> Iterator[Span]:
    """The rows in ranges of modest size."""
    step = max(1, PIECE_WEIGHTS // max(1, width))
    for start in range(rows[0], rows[1], step):
        yield start, min(rows[1], start + step)


def block_columns(columns: Span, size: int, name: str) -> slice:
    """The blocks that these columns are; refused where they cut through one."""
    if columns[0] % size or columns[1] % size:
        raise UnsupportedModelError(
            f"columns {columns[0]} to {columns[1]} of {name!r} cut through its blocks of {size}",
            hint="split this model over fewer tensor ranks, or use a 16-bit version of it",
        )
    return slice(columns[0] // size, columns[1] // size)


def _blocks(groups: Groups, size: int, rows: Span, columns: Span, read: ReadRows, name: str) -> BlockMatrix:
    kept = block_columns(columns, size, name)
    blocks = groups.width // size
    # Every block lies in one group.
    group = (np.arange(blocks) * size // groups.size)[kept]
    shape = (rows[1] - rows[0], kept.stop - kept.start)
    codes = np.empty((*shape, size * groups.held_bits // 8), np.uint8)
    scales = np.empty(shape, np.float32)
    shifts: Float32 | None = None
    half = np.float32(1 << (groups.bits - 1))
    for start, stop in pieces(rows, groups.width):
        piece, target = read(start, stop), slice(start - rows[0], stop - rows[0])
        codes[target] = piece.codes.reshape(stop - start, blocks, -1)[:, kept]
        scales[target] = piece.scales[:, group]
        if piece.zeros is not None:
            if shifts is None:
                shifts = np.zeros(shape, np.float32)
            shifts[target] = (piece.scales * (half - piece.zeros))[:, group]
    if shifts is not None and not shifts.any():
        shifts = None  # symmetric, though zeros are written
    return BlockMatrix(groups.held_bits, size, codes, scales, shifts)


def _dense(groups: Groups, rows: Span, columns: Span, read: ReadRows) -> DenseMatrix:
    order = groups.order if groups.order is not None else np.arange(groups.width) // groups.size
    order = order[slice(*columns)]
    values = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
    for start, stop in pieces(rows, groups.width):
        piece = read(start, stop)
        codes = piece.codes
        if groups.held_bits == 4:
            codes = np.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(stop - start, -1)
        centred = codes[:, slice(*columns)].astype(np.float32) - np.float32(1 << (groups.held_bits - 1))
        if piece.zeros is not None:
            centred += np.float32(1 << (groups.bits - 1)) - piece.zeros[:, order]
        values[start - rows[0] : stop - rows[0]] = centred * piece.scales[:, order]
    return DenseMatrix(values)
