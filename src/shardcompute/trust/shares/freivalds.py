"""Freivalds' check: whether a machine's products are those of the rows that it was sent, without computing them.

Whoever has the weights once draws `CHECKS` secret vectors r of bits over a map's outputs and keeps r and W'r.
Products Y of rows X are right only if Y r = X W'r modulo 2^64 for each of them. Of a wrong row some entry differs by
e ≠ 0; whatever the other bits are, at most one of the two values of that entry's bit satisfies the equation. So each
vector misses a wrong row with probability at most one half, and all of them with at most 2^-CHECKS.

Vectors are used again and again, which is sound as long as nobody who failed is asked again: who passes has learnt
nothing that he did not know.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from shardcompute.trust.shares.fixed_point import Ring, RingMatrix

CHECKS = 40


@dataclass(frozen=True, slots=True)
class ProductCheck:
    """Secret vectors of one map: `[outputs, CHECKS]`, and the map's products with them `[inputs, CHECKS]`."""

    bits: Ring
    mapped: Ring

    def accepts(self, rows: Ring, products: Ring) -> bool:
        """Whether these are the products; wrong ones are accepted with probability 2^-CHECKS at most."""
        if products.shape != (len(rows), len(self.bits)):
            return False
        return bool(np.array_equal(products @ self.bits, rows @ self.mapped))


def make_check(matrix: RingMatrix) -> ProductCheck:
    drawn = np.frombuffer(os.urandom(matrix.outputs * (CHECKS // 8)), dtype=np.uint8)
    bits = np.unpackbits(drawn.reshape(matrix.outputs, -1), axis=1).astype(np.uint64)
    # Sums of weights are far below 2^53: exact.
    mapped = (matrix.integers.T @ bits.astype(np.float64)).astype(np.int64).view(np.uint64)
    return ProductCheck(bits, np.ascontiguousarray(mapped))
