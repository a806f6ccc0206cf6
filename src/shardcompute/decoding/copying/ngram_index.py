"""An index of a session's own tokens: where its last few occurred before, and so what the text went on with there.

It grows with the known tokens, a few entries each, and holds positions only: tokens are compared where they are, so
that an entry that is out of date is at worst no match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LENGTHS = (5, 3, 2)
"""Indexed lengths, longest first. Matches are measured in full, so that those in between count as what they are."""
_OCCURRENCES = 6
"""So many earlier places are looked at for one length."""
_LONGEST_MATCH = 24
_INDEXED_PER_CALL = 8192
"""A very long prompt is indexed over several calls, so that none takes more than milliseconds."""


@dataclass(frozen=True, slots=True, order=True)
class NgramMatch:
    """The last `length` tokens occurred before, up to the position `end`."""

    length: int
    end: int


class NgramIndex:
    """Where each run of tokens ended, latest first, for one session."""

    def __init__(self) -> None:
        self.length = 0
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in _LENGTHS)
        self._earlier: tuple[list[int], ...] = tuple([0] for _ in _LENGTHS)
        """For each end of a run, the end of the same run before it; 0: none."""

    def extend(self, known: Sequence[int]) -> None:
        """Index more of `known`, which goes on from what was indexed."""
        stop = min(len(known), self.length + _INDEXED_PER_CALL)
        for size, latest, earlier in zip(_LENGTHS, self._latest, self._earlier, strict=True):
            for end in range(self.length + 1, stop + 1):
                if end < size:
                    earlier.append(0)
                    continue
                key = hash(tuple(known[end - size : end]))
                earlier.append(latest.get(key, 0))
                latest[key] = end
        self.length = max(self.length, stop)

    def matches(self, known: Sequence[int], assumed: Sequence[int]) -> list[NgramMatch]:
        """Earlier occurrences of the end of `known` and `assumed`, of the longest indexed length that has some."""
        tail = (*known[max(0, len(known) - _LONGEST_MATCH) :], *assumed)[-_LONGEST_MATCH:]
        total = len(known) + len(assumed)
        for which, size in enumerate(_LENGTHS):
            if len(tail) < size:
                continue
            ends = self._occurrences(which, tail[-size:], min(total, len(known) + 1))
            found = [NgramMatch(length, end) for end in ends if (length := _match(known, tail, end)) >= size]
            if found:
                return found
        return []

    def _occurrences(self, which: int, suffix: tuple[int, ...], before: int) -> list[int]:
        """Ends of earlier runs that (up to collisions) equal `suffix`, latest first; all of them `< before`."""
        ends: list[int] = []
        end = self._latest[which].get(hash(suffix), 0)
        while end and len(ends) < _OCCURRENCES:
            if end < before:
                ends.append(end)
            end = self._earlier[which][end]
        return ends


def token_at(known: Sequence[int], assumed: Sequence[int], drafted: Sequence[int], position: int) -> int:
    """Of a text in three parts."""
    if position < len(known):
        return known[position]
    position -= len(known)
    return assumed[position] if position < len(assumed) else drafted[position - len(assumed)]


def _match(known: Sequence[int], tail: Sequence[int], end: int) -> int:
    """How many tokens before `end` equal the end of `tail`."""
    length = 0
    while length < min(len(tail), end) and known[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length
