"""The ring of integers modulo 2^64: splitting into uniform shares, multiplying with a map, and joining again.

A share alone is uniform whatever was split, so it tells nothing; only who has both can tell. Multiplying is linear, so
the products of two shares are shares of the product.
"""

from __future__ import annotations

import os

import numpy as np

from shardcompute.trust.shares.fixed_point import Float64, Ring, RingMatrix

_LIMB_BITS = 16
_LIMBS = 4
_LIMB_MASK = np.uint64((1 << _LIMB_BITS) - 1)
_MOST_COLUMNS = 1 << 14
"""Of one exact sum: 16 bits of a limb, 22 of a weight and 14 of columns stay within the 53 of a float64."""


def split(values: Ring) -> tuple[Ring, Ring]:
    """Two shares whose sum is `values`. The first is drawn from the system's source of secrets."""
    drawn = np.frombuffer(os.urandom(values.nbytes), dtype=np.uint64).reshape(values.shape)
    return drawn, values - drawn


def join(one: Ring, other: Ring) -> Ring:
    return one + other


def multiply(rows: Ring, matrix: RingMatrix) -> Ring:
    """Rows `[rows, inputs]` times a map, modulo 2^64 and exactly.

    Rows are cut into limbs of 16 bits, so that each sum is a whole number that float64 holds: what multiplies floats
    fastest multiplies these.
    """
    count = len(rows)
    out = np.zeros((count, matrix.outputs), dtype=np.uint64)
    shifts = [np.uint64(_LIMB_BITS * limb) for limb in range(_LIMBS)]
    for start in range(0, matrix.inputs, _MOST_COLUMNS):
        part = rows[:, start : start + _MOST_COLUMNS]
        limbs = np.concatenate([(part >> shift) & _LIMB_MASK for shift in shifts]).astype(np.float64)
        sums: Float64 = limbs @ matrix.integers[:, start : start + _MOST_COLUMNS].T
        whole = sums.astype(np.int64).view(np.uint64)
        for limb, shift in enumerate(shifts):
            out += whole[limb * count : (limb + 1) * count] << shift
    return out
