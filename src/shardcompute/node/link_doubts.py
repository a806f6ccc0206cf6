"""Links that break again as soon as they are used: after a few times they count as closed, until a probe gets
through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

_LIMIT = 3
Pair = tuple[str, str]


class LinkDoubts:
    """Counts how often a link broke without having been part of a working chain in between."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._breaks: Counter[Pair] = Counter()
        self._closed: dict[Pair, Pair] = {}

    def broke(self, reporter: str, node: str) -> bool:
        """True when this was once too often."""
        pair = _pair(reporter, node)
        self._breaks[pair] += 1
        if self._breaks[pair] < self._limit:
            return False
        del self._breaks[pair]
        self._closed[pair] = (reporter, node)
        return True

    def worked(self, ring: Sequence[str]) -> None:
        """A chain along these nodes is in use."""
        for a, b in pairwise(ring):
            self._breaks.pop(_pair(a, b), None)

    def opened(self, a: str, b: str) -> None:
        self._closed.pop(_pair(a, b), None)

    def closed(self) -> Iterable[Pair]:
        """Who could not reach whom."""
        return tuple(self._closed.values())


def _pair(a: str, b: str) -> Pair:
    return (a, b) if a < b else (b, a)
