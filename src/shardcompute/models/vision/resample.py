"""Resampling of pictures in whole numbers, as Pillow does it, which image processors of models use.

Each output pixel is a weighted sum of input pixels, first along rows, then along columns, rounded to bytes in between;
weights are rounded to 22 bits. A shrinking picture is averaged over as many pixels as it shrinks by. Pillow gives the
same bytes where it begins with rows; later releases begin with columns in some sizes, which is a step or two apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""`[height, width, channels]`"""
Resampling = Literal["bilinear", "bicubic"]

_Float64 = NDArray[np.float64]
_BITS = 22
_ROWS = 256
"""Computed at once: sums take four bytes where pixels take one."""


def resize(pixels: Pixels, height: int, width: int, resampling: Resampling) -> Pixels:
    for axis, size in ((1, width), (0, height)):
        if pixels.shape[axis] != size:
            lines = np.moveaxis(pixels, axis, 1)
            first, weights = _weights(lines.shape[1], size, resampling)
            parts = [
                _resample(lines[row : row + _ROWS], first, weights) for row in range(0, len(lines), _ROWS)
            ]
            pixels = np.moveaxis(np.concatenate(parts), 1, axis)
    return np.ascontiguousarray(pixels)


def _resample(lines: Pixels, first: NDArray[np.int64], weights: NDArray[np.int32]) -> Pixels:
    """Lines `[lines, size, channels]` of the wanted size: weights `[taps, size]` of the pixels from `first` on."""
    last = lines.shape[1] - 1
    sums = np.full((len(lines), len(first), lines.shape[2]), 1 << (_BITS - 1), dtype=np.int32)
    for tap, weight in enumerate(weights):
        sums += lines[:, np.minimum(first + tap, last)].astype(np.int32) * weight[None, :, None]
    clipped: Pixels = np.clip(sums >> _BITS, 0, 255).astype(np.uint8)
    return clipped


def _weights(size: int, wanted: int, resampling: Resampling) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """For each wanted pixel the first one that it is made of, and the weights `[taps, wanted]` from there on."""
    kernel, support = _KERNELS[resampling]
    scale = size / wanted
    stretch = max(scale, 1.0)
    reach = support * stretch
    centres = (np.arange(wanted) + 0.5) * scale
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    counts = np.minimum((centres + reach + 0.5).astype(np.int64), size) - first
    weights = np.zeros((math.ceil(reach) * 2 + 1, wanted))
    total = np.zeros(wanted)
    for tap, row in enumerate(weights):
        row[:] = np.where(tap < counts, kernel((tap + first - centres + 0.5) * (1.0 / stretch)), 0.0)
        total += row  # one by one: the order of additions counts
    shares = np.divide(weights, total, out=weights, where=total != 0) * (1 << _BITS)
    return first, (shares + np.where(shares < 0, -0.5, 0.5)).astype(np.int32)


def _linear(x: _Float64) -> _Float64:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _cubic(x: _Float64) -> _Float64:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_KERNELS: dict[str, tuple[Callable[[_Float64], _Float64], float]] = {
    "bilinear": (_linear, 1.0),
    "bicubic": (_cubic, 2.0),
}
