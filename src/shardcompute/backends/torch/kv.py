"""KV of sessions in one pool of pages on the device.

The pool is allocated once, `[layers, parts, pages, heads, PAGE_TOKENS, entries]`, within the budget; a session
owns a list of page numbers, the same for every layer. One page more than sessions may use, `scratch`, takes what
the padded rows of a graph write.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shardcompute.backends.kv import PageBudget
from shardcompute.backends.page_tables import PageTables
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import CapacityError
from shardcompute.core.kv_types import KvShape


class PagedKv:
    """Keys and values of all sessions of one slice."""

    def __init__(
        self,
        layers: int,
        shape: KvShape,
        *,
        context_length: int,
        budget_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.row_bytes = shape.parts * shape.heads * shape.entries * dtype.itemsize
        page_bytes = max(1, layers * self.row_bytes * PAGE_TOKENS)
        pages = budget_bytes // page_bytes
        if pages < 2:
            raise CapacityError(
                f"{budget_bytes} bytes of KV memory do not hold two pages ({page_bytes} bytes each)",
                hint="give more with --kv-memory",
            )
        self.budget = PageBudget(page_bytes, pages - 1, context_length)
        self.scratch = pages - 1
        self.pool = torch.zeros(
            (layers, shape.parts, pages, shape.heads, PAGE_TOKENS, shape.entries), dtype=dtype, device=device
        )
        self._tables = PageTables(self.budget)
        self._rows: dict[int, tuple[list[int], NDArray[np.int32]]] = {}
        """Tables as kernels take them, and what each was made of."""

    @property
    def table_width(self) -> int:
        """Pages of a session as long as the context."""
        return self._tables.width

    def table(self, session: int) -> Sequence[int]:
        """The session's pages, in the order of its tokens."""
        return self._tables[session]

    def table_rows(self, sessions: Sequence[int]) -> NDArray[np.int32]:
        """The tables of these sessions, `[sessions, table_width]`; unused entries name the scratch page."""
        return np.stack([self._table_row(session) for session in sessions])

    def take(self, segments: Sequence[Segment]) -> None:
        """Make room for a batch, all of it or none; pages past a truncated session's end are freed."""
        self._tables.take(segments)

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool) -> None:
        """See `Executor.adopt`. Pages are copied, on the device, unless they are moved."""
        copied, table = self._tables.adopt(source, target, length, is_moved=is_moved)
        if copied:
            self.pool[:, :, table] = self.pool[:, :, copied]

    def release(self, session: int) -> None:
        self._tables.release(session)
        self._rows.pop(session, None)

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None
    ) -> None:
        """Put `[rows, kv_heads, head_dim]` keys and values at `places` (page · PAGE_TOKENS + slot). No values where
        keys are both."""
        pages, slots = places // PAGE_TOKENS, places % PAGE_TOKENS
        self.pool[layer, 0, pages, :, slots] = keys.to(self.pool.dtype)
        if values is not None:
            self.pool[layer, 1, pages, :, slots] = values.to(self.pool.dtype)

    def read(self, layer: int, pages: torch.Tensor, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `stop` keys and values of those pages, `[kv_heads, stop, head_dim]`."""
        parts = self.pool[layer][:, pages].transpose(1, 2).flatten(2, 3)[:, :, :stop]
        return parts[0], parts[-1]

    @property
    def format(self) -> str:
        _, parts, _, heads, _, entries = self.pool.shape
        return f"paged {self.pool.dtype} {parts}x{heads}x{entries}"

    def read_rows(self, session: int, layers: range, rows: range) -> memoryview:
        """`[row, layer, key or value, head, entry]` of these, as bytes."""
        pages, slots = self._places(session, rows)
        # Indices on both sides of a slice: their dimension comes first.
        content = self.pool[layers.start : layers.stop, :, pages, :, slots].contiguous()
        return memoryview(content.view(torch.uint8).cpu().numpy().reshape(-1)).cast("B")

    def write_rows(self, session: int, layers: range, rows: range, content: memoryview) -> None:
        pages, slots = self._places(session, rows)
        _, parts, _, heads, _, entries = self.pool.shape
        written = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(self.pool.dtype)
        shape = (len(rows), len(layers), parts, heads, entries)
        self.pool[layers.start : layers.stop, :, pages, :, slots] = written.view(shape).to(self.pool.device)

    def _places(self, session: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        table = np.asarray(self._tables[session], dtype=np.int64)
        positions = np.arange(rows.start, rows.stop)
        pages, slots = torch.from_numpy(table[positions // PAGE_TOKENS]), positions % PAGE_TOKENS
        return pages.to(self.pool.device), torch.from_numpy(slots).to(self.pool.device)

    def _table_row(self, session: int) -> NDArray[np.int32]:
        table = list(self._tables[session])
        made_of, row = self._rows.get(session, ([], None))
        if row is None or made_of != table:
            row = np.full(self.table_width, self.scratch, dtype=np.int32)
            row[: len(table)] = table
            self._rows[session] = table, row
        return row
