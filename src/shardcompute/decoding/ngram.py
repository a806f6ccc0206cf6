"""Drafts from the session's own text: what followed the last few tokens when they occurred before.

Free of cost and often right where a text repeats itself: code, quotations, tables, edits of a given text. The
index grows with the known tokens, a few dictionary entries each, and holds positions only.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.core.steps import Draft, Opening
from shardcompute.decoding.drafting import GRADES

_LENGTHS = (5, 3, 2)
"""Indexed lengths, longest first. Matches are measured in full, so that those in between count as what they are."""
_OCCURRENCES = 6
"""So many earlier places are looked at for one length."""
_LONGEST_MATCH = 24
_INDEXED_PER_CALL = 8192
"""A very long prompt is indexed over several calls, so that none takes more than milliseconds."""


class _Index:
    """Where each run of tokens ended, latest first, for one session."""

    def __init__(self) -> None:
        self.length = 0
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in _LENGTHS)
        self._earlier: tuple[list[int], ...] = tuple([0] for _ in _LENGTHS)
        """For each end of a run, the end of the same run before it; 0: none."""

    def extend(self, known: Sequence[int]) -> None:
        stop = min(len(known), self.length + _INDEXED_PER_CALL)
        for size, latest, earlier in zip(_LENGTHS, self._latest, self._earlier, strict=True):
            for end in range(self.length + 1, stop + 1):
                if end < size:
                    earlier.append(0)
                    continue
                key = hash(tuple(known[end - size : end]))
                earlier.append(latest.get(key, 0))
                latest[key] = end
        self.length = stop

    def occurrences(self, which: int, suffix: tuple[int, ...], before: int) -> list[int]:
        """Ends of earlier runs that (up to collisions) equal `suffix`, latest first; all of them `< before`."""
        ends: list[int] = []
        end = self._latest[which].get(hash(suffix), 0)
        while end and len(ends) < _OCCURRENCES:
            if end < before:
                ends.append(end)
            end = self._earlier[which][end]
        return ends


class NgramDrafter:
    """Copies what came after the longest earlier match; among equals, the latest one."""

    name = "ngram"
    is_slow = False

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(
        self, session: int, known: Sequence[int], assumed: Sequence[int], limit: int, opening: Opening
    ) -> Draft | None:
        index = self._indices.get(session)
        if index is None:
            index = self._indices[session] = _Index()
        index.extend(known)
        total = len(known) + len(assumed)
        tail = (*known[max(0, len(known) - _LONGEST_MATCH) :], *assumed)[-_LONGEST_MATCH:]
        for which, size in enumerate(_LENGTHS):
            if limit < 1 or len(tail) < size:
                continue
            ends = index.occurrences(which, tail[-size:], total)
            matches = [(length, end) for end in ends if (length := _match(known, tail, end)) >= size]
            if matches:
                ids, grade = _draft(known, assumed, matches, limit)
                return Draft(session, total, ids, grade)
        return None

    def forget(self, session: int) -> None:
        self._indices.pop(session, None)

    def close(self) -> None:
        self._indices.clear()


def _match(known: Sequence[int], tail: Sequence[int], end: int) -> int:
    """How many tokens before `end` equal the end of `tail`."""
    length = 0
    while length < min(len(tail), end) and known[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length


def _draft(
    known: Sequence[int], assumed: Sequence[int], matches: Sequence[tuple[int, int]], limit: int
) -> tuple[tuple[int, ...], int]:
    """The tokens that followed the longest match, and the grade."""
    length, end = max(matches)
    ids: list[int] = []
    for position in range(end, end + limit):
        # Past the known text it goes on through its own draft: what repeats with a period goes on repeating.
        ids.append(_token(known, assumed, ids, position))
    following = [_token(known, assumed, ids, other) for _, other in matches]
    return tuple(ids), _grade(length, following)


def _token(known: Sequence[int], assumed: Sequence[int], drafted: Sequence[int], position: int) -> int:
    if position < len(known):
        return known[position]
    position -= len(known)
    return assumed[position] if position < len(assumed) else drafted[position - len(assumed)]


def _grade(length: int, following: Sequence[int]) -> int:
    """From the match's length; one up where several places agree on the next token, one down where they do not."""
    grade = sum(length >= bound for bound in (3, 5, 9))
    if len(following) > 1:
        grade += 1 if len(set(following)) == 1 else -1
    return min(max(grade, 0), GRADES - 1)
