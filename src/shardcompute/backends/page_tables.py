"""Page tables of a KV pool on a device: which pages of `PAGE_TOKENS` tokens each session owns, in order.

The numbers alone: whoever owns the pool copies what `adopt` names. Freed pages are given out again first, lowest
number first, so that a pool is used from its beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shardcompute.backends.kv import PageBudget, count_pages
from shardcompute.core.batch import Segment


class PageTables:
    """Page numbers of sessions within a budget; what cannot be given is refused before anything changes."""

    def __init__(self, budget: PageBudget) -> None:
        self.budget = budget
        self._freed: list[int] = []
        self._next = 0
        self._tables: dict[int, list[int]] = {}

    @property
    def width(self) -> int:
        """Pages of a session as long as the context."""
        return count_pages(self.budget.context_length)

    def __getitem__(self, session: int) -> Sequence[int]:
        """The session's pages, in the order of its tokens."""
        return self._tables[session]

    def take(self, segments: Sequence[Segment]) -> list[int]:
        """Make room for a batch, all of it or none, and say which pages are newly owned; pages past a truncated
        session's end are freed."""
        self.budget.check(segments)
        taken: list[int] = []
        for segment in segments:
            table = self._tables.setdefault(segment.session, [])
            pages = count_pages(segment.stop)
            self._trim(table, pages)
            while len(table) < pages:
                table.append(self._pop())
                taken.append(table[-1])
            self.budget.take(segment)
        return taken

    def adopt(
        self, source: int, target: int, length: int, *, is_moved: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        """See `Executor.adopt`. Pages to copy from and to; none where they are moved."""
        self.budget.adopt(source, target, length, is_moved=is_moved)
        self._trim(self._tables.pop(target, []), 0)
        pages = count_pages(length)
        if is_moved:
            table = self._tables.pop(source)
            self._trim(table, pages)
            self._tables[target] = table
            return (), ()
        table = self._tables[target] = [self._pop() for _ in range(pages)]
        return self._tables[source][:pages], table

    def release(self, session: int) -> None:
        self.budget.release(session)
        self._trim(self._tables.pop(session, []), 0)

    def _pop(self) -> int:
        if self._freed:
            return heapq.heappop(self._freed)
        self._next += 1
        return self._next - 1

    def _trim(self, table: list[int], pages: int) -> None:
        while len(table) > pages:
            heapq.heappush(self._freed, table.pop())
