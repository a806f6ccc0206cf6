"""int4 quantisation: blocks fitted by weighted least squares: `w ≈ scale · (code − 8) + shift` in blocks of 32.

Each block tries a few widths of the grid; for each, the rounded weights decide the best scale and shift
outright, and the width with the least error wins. Errors count by `importance`, one number for each input
column: the mean square of what that column is multiplied with, where it is known. Weights that already lie on
a grid of 14 to 16 levels, first and last in use, come back as they were.

All arithmetic is elementwise over blocks, sums included: a block's result never depends on its neighbours, so
a slice of a matrix is quantised exactly like the whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32

BLOCK_SIZE = 32
Blocks = tuple[NDArray[np.uint8], Float32, Float32]

# Grid steps between a block's least and largest weight: 15 use all levels, fewer leave some unused, more clip
# the extremes to be finer between them.
_STEPS = (15, 14, 13, 16, 17)
# Rounding to the solved grid and solving again: the second time still helps, the third hardly.
_REFINEMENTS = 2
# A column never counts for less than this part of the block's most important one: statistics are samples.
_LEAST_IMPORTANCE = np.float32(1e-4)
_LEAST_VARIANCE = np.float32(1e-12)
# A block whose weights differ by less holds one number; dividing by its range could overflow.
_LEAST_RANGE = np.float32(1e-30)


def block_importance(activation_scale: Float32) -> Float32:
    """Importance `[width]` of input columns whose activations have these root mean squares."""
    blocks = activation_scale.astype(np.float32).reshape(-1, BLOCK_SIZE)
    largest = blocks.max(axis=1, keepdims=True)
    relative = blocks / np.where(largest > 0, largest, np.float32(1))
    return np.maximum(relative * relative, _LEAST_IMPORTANCE).reshape(-1)


def fit_blocks(rows: Float32, importance: Float32 | None) -> Blocks:
    """Codes `[n, blocks, 16]`, scales and shifts `[n, blocks]` of finite rows `[n, blocks · 32]`."""
    shape = (rows.shape[0], rows.shape[1] // BLOCK_SIZE)
    x = np.ascontiguousarray(rows.reshape(-1, BLOCK_SIZE).T)
    low, high = x.min(axis=0), x.max(axis=0)
    middle = low * np.float32(0.5) + high * np.float32(0.5)
    reach = high * np.float32(0.5) - low * np.float32(0.5)
    is_flat = reach < _LEAST_RANGE
    x -= middle
    x /= np.where(is_flat, np.float32(1), reach)
    fit = _BlockFit(x, _spread(importance, shape))
    for steps in _STEPS:
        step = 2 / steps
        # The least weight gets the lowest code; where the codes do not suffice, both ends lose the same.
        shift = max(8 * step - 1, step / 2)
        fit.offer(fit.round(np.float32(step), np.float32(shift)))
    for _ in range(_REFINEMENTS):
        fit.offer(fit.round(fit.scale, fit.shift))
    codes = _pack(fit.round(fit.scale, fit.shift))
    scales = (fit.scale * reach).reshape(shape)
    shifts = (fit.shift * reach + middle).reshape(shape)
    return codes.reshape(*shape, BLOCK_SIZE // 2), scales, shifts


def _spread(importance: Float32 | None, shape: tuple[int, int]) -> Float32:
    if importance is None:
        return np.ones((BLOCK_SIZE, shape[0] * shape[1]), np.float32)
    return np.tile(importance.reshape(shape[1], BLOCK_SIZE).T, shape[0])


class _BlockFit:
    """The best scale and shift so far of blocks of numbers from −1 to 1, the columns of `x`."""

    def __init__(self, x: Float32, weight: Float32) -> None:
        self._x = x
        self._weight = weight
        self._weight_sum = _sum(weight.copy())
        self._mean = _sum(weight * x) / self._weight_sum
        self._weighted = weight * (x - self._mean)
        self._scratch = np.empty_like(x)
        self._explained = np.full(x.shape[1], -1, np.float32)
        self.scale = np.ones_like(self._explained)
        self.shift = np.zeros_like(self._explained)

    def round(self, scale: Float32 | np.float32, shift: Float32 | np.float32) -> Float32:
        """The nearest grid numbers, −8 to 7, as floats."""
        grid = self._x - shift
        grid /= scale
        np.rint(grid, out=grid)
        return np.clip(grid, -8, 7, out=grid)

    def offer(self, grid: Float32) -> None:
        """Solve for the scale and shift that suit these numbers; keep them where they beat the best so far.

        Overwrites `grid`, to centre it before squares are summed: one important column would drown the rest.
        """
        mean_grid = _sum(np.multiply(self._weight, grid, out=self._scratch)) / self._weight_sum
        grid -= mean_grid
        covariance = _sum(np.multiply(self._weighted, grid, out=self._scratch))
        np.multiply(self._weight, grid, out=self._scratch)
        self._scratch *= grid
        variance = _sum(self._scratch)
        scale = covariance / np.maximum(variance, _LEAST_VARIANCE)
        explained = scale * covariance
        is_better = (explained > self._explained) & (scale > 0)
        np.copyto(self._explained, explained, where=is_better)
        np.copyto(self.scale, scale, where=is_better)
        np.copyto(self.shift, self._mean - scale * mean_grid, where=is_better)


def _sum(values: Float32) -> Float32:
    """Sums over the first axis in one fixed order; overwrites `values`."""
    half = BLOCK_SIZE // 2
    while half:
        values[:half] += values[half : 2 * half]
        half //= 2
    total: Float32 = values[0].copy()
    return total


def _pack(grid: Float32) -> NDArray[np.uint8]:
    """`[32, blocks]` numbers from −8 to 7 → `[blocks, 16]` bytes."""
    codes = (grid + np.float32(8)).astype(np.uint8)
    return np.ascontiguousarray((codes[0::2] | (codes[1::2] << np.uint8(4))).T)
