"""Routers of sparse layers, computed row by row inside llama.cpp's own computation.

Files keep a router in float32, and llama.cpp sums a float32 product up in another order for one row than for several. A
row alone would have to be computed with a neighbour, whose experts are mostly others: twice the weights read. So of
several rows its evaluation callback stops at a router's logits and puts those in their place that each row has alone:
its own product again, of as many batches of one row.
"""

from __future__ import annotations

import ctypes
from typing import Any

from shardcompute.backends.llamacpp.library import GgmlInitParams

LOGITS = b"ffn_moe_logits-"
"""How llama.cpp names the logits of a layer's router; its number follows."""
_F32 = 0
_NUMBER_BYTES = 4
_WORD_BYTES = 8
_NODES = 16
_SPARE_BYTES = 1 << 16
"""For what a computation needs besides numbers: records, alignment, and what its threads share."""


class RouterRows:
    """Replaces routers' logits in a context whose tensors lie in the process's own memory. Not thread-safe."""

    def __init__(self, library: Any, hidden: int, threads: int) -> None:
        self._c = library
        self._hidden = hidden
        self._threads = threads
        self._room: ctypes.Array[ctypes.c_char] = ctypes.create_string_buffer(0)
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
        weights, x = words[self._inputs_at - 1], words[self._inputs_at]
        experts, rows = self._rows_of(weights), self._rows_of(x)
        if rows > 1 and experts and self._c.ggml_nelements(tensor) == rows * experts:
            self._route(weights, self._c.ggml_get_data(x), rows, self._c.ggml_get_data(tensor), experts)

    def _rows_of(self, tensor: int) -> int:
        """How many float32 rows a tensor has, one behind the other; 0 of any other."""
        if not tensor or ctypes.c_int32.from_address(tensor).value != _F32:
            return 0
        rows, odd = divmod(self._c.ggml_nelements(tensor), self._hidden)
        is_plain = not odd and self._c.ggml_get_data(tensor) and self._c.ggml_is_contiguous(tensor)
        return rows if is_plain else 0

    def _route(self, weights: int, x: int, rows: int, logits: int, experts: int) -> None:
        """`logits` = `x` times `weights`, each row as if it were alone."""
        c, row_bytes = self._c, _NUMBER_BYTES * self._hidden
        needed = rows * (row_bytes + _NUMBER_BYTES * experts) + _SPARE_BYTES
        if len(self._room) < needed:
            self._room = ctypes.create_string_buffer(needed)
        context = c.ggml_init(GgmlInitParams(len(self._room), ctypes.addressof(self._room), False))
        try:
            inputs = c.ggml_new_tensor_3d(context, _F32, self._hidden, 1, rows)
            ctypes.memmove(c.ggml_get_data(inputs), x, rows * row_bytes)
            product = c.ggml_mul_mat(context, weights, inputs)
            graph = c.ggml_new_graph_custom(context, _NODES, False)
            c.ggml_build_forward_expand(graph, product)
            if c.ggml_graph_compute_with_ctx(context, graph, self._threads) == 0:
                ctypes.memmove(logits, c.ggml_get_data(product), rows * experts * _NUMBER_BYTES)
        finally:
            c.ggml_free(context)
