"""KV of sessions on the device: per layer a pool of keys and one of values, `[pages · PAGE_TOKENS, heads, entries]`.

The pools are allocated once, within the budget. A step's compiled functions take a pool and give back the written
one, which MLX writes in place since nothing else holds it. One page more than sessions may use, `scratch`, takes
what padded rows write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from shardcompute.backends.kv import PageBudget
from shardcompute.backends.page_tables import PageTables
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import CapacityError
from shardcompute.core.kv_types import KvShape


class MlxKv:
    """Keys and values of all sessions of one slice. `keys` and `values` are replaced by whoever writes them."""

    def __init__(
        self, layers: int, kept: KvShape, *, context_length: int, budget_bytes: int, dtype: Any
    ) -> None:
        page_bytes = max(1, layers * kept.parts * kept.heads * PAGE_TOKENS * kept.entries * dtype.size)
        pages = budget_bytes // page_bytes
        if pages < 2:
            raise CapacityError(
                f"{budget_bytes} bytes of KV memory do not hold two pages ({page_bytes} bytes each)",
                hint="give more with --kv-memory",
            )
        self.budget = PageBudget(page_bytes, pages - 1, context_length)
        self.scratch = pages - 1
        self.tables = PageTables(self.budget)
        shape = (pages * PAGE_TOKENS, kept.heads, kept.entries)
        self.keys = [mx.zeros(shape, dtype) for _ in range(layers)]
        # Where keys are values too, the others' pool is only there to be passed on.
        self.values = [mx.zeros(shape if kept.parts > 1 else (1,), dtype) for _ in range(layers)]
        self._pools = (self.keys, self.values)[: kept.parts]
        mx.eval(self.keys, self.values)

    def take(self, segments: Sequence[Segment]) -> None:
        """Make room for a batch, all of it or none. Pages are zeroed before they are used again: what is read past
        a session's end counts nothing, which holds for numbers and not for a former session's infinities."""
        pages = self.tables.take(segments)
        if pages:
            slots = _slots(pages)
            for pools in self._pools:
                for layer in range(len(pools)):
                    pools[layer][slots] = 0

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool) -> None:
        """See `Executor.adopt`. Pages are copied, on the device, unless they are moved."""
        copied, table = self.tables.adopt(source, target, length, is_moved=is_moved)
        if copied:
            origin, slots = _slots(copied), _slots(table)
            for pools in self._pools:
                for layer in range(len(pools)):
                    pools[layer][slots] = pools[layer][origin]

    def release(self, session: int) -> None:
        self.tables.release(session)


def _slots(pages: Sequence[int]) -> Any:
    starts = np.asarray(pages, dtype=np.int32) * PAGE_TOKENS
    return mx.array((starts[:, None] + np.arange(PAGE_TOKENS, dtype=np.int32)).reshape(-1))
