"""Routers of sparse layers, computed row by row inside llama.cpp's own computation.

Files keep a router in float32, and llama.cpp sums a float32 product up in another order for one row than for several. A
row alone would have to be computed with a neighbour, whose experts are mostly others: twice the weights read. So its
evaluation callback stops at a router's logits and puts those in their place that are made here, of each row by itself.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from shardcompute.backends.matrix import Float32

LOGITS = b"ffn_moe_logits-"
"""How llama.cpp names the logits of a layer's router; its number follows."""
_F32 = 0
_WORD_BYTES = 8


class RouterRows:
    """Replaces routers' logits in a context whose tensors lie in the process's own memory. Not thread-safe."""

    def __init__(self, library: Any, hidden: int) -> None:
        self._c = library
        self._hidden = hidden
        self._inputs_at: int | None = None
        """Which word of a tensor's record is its second source; the first, the router's weights, is before it."""
        self.seen: set[int] | None = set()
        """Tensors as they are announced, until the first router is found."""

    def replace(self, tensor: int, record_bytes: int) -> None:
        """Of logits that were just computed; `record_bytes` lie between a tensor's address and its name. What is not
        laid out as expected stays as it is: the probe of rows then finds out what that means."""
        words = (ctypes.c_uint64 * (record_bytes // _WORD_BYTES)).from_address(tensor)
        if self.seen is not None:
            # Rows come from a tensor of this computation, weights do not.
            seen, self.seen = self.seen, None
            self._inputs_at = next((at for at, word in enumerate(words) if at and word in seen), None)
        if self._inputs_at is None:
            return
        weights, x = self._rows_of(words[self._inputs_at - 1]), self._rows_of(words[self._inputs_at])
        if weights is None or x is None or self._c.ggml_nelements(tensor) != len(x) * len(weights):
            return
        logits = route_rows(x, weights)
        ctypes.memmove(self._c.ggml_get_data(tensor), logits.ctypes.data, logits.nbytes)

    def _rows_of(self, tensor: int) -> Float32 | None:
        """A tensor of float32 rows, where it lies; None of any other."""
        if not tensor or ctypes.c_int32.from_address(tensor).value != _F32:
            return None
        rows, odd = divmod(self._c.ggml_nelements(tensor), self._hidden)
        address = self._c.ggml_get_data(tensor)
        if odd or not address or not self._c.ggml_is_contiguous(tensor):
            return None
        numbers = (ctypes.c_float * (rows * self._hidden)).from_address(address)
        return np.frombuffer(numbers, np.float32).reshape(rows, self._hidden)


def route_rows(x: Float32, weights: Float32) -> Float32:
    """`x @ weights.T` as one product of two vectors for each number, so that a row has the same bits in any company."""
    logits: Float32 = np.vecdot(x[:, None, :], weights[None])
    return logits
