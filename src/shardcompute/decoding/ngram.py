"""Drafts from the session's own text: what followed the last few tokens when they occurred before.

Free of cost and often right where a text repeats itself: code, quotations, tables, edits of a given text.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.core.steps import Draft, Opening
from shardcompute.decoding.copying.ngram_index import NgramIndex, NgramMatch, token_at
from shardcompute.decoding.drafting import GRADES


class NgramDrafter:
    """Copies what came after the longest earlier match; among equals, the latest one."""

    name = "ngram"
    is_slow = False

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(
        self, session: int, known: Sequence[int], assumed: Sequence[int], limit: int, opening: Opening
    ) -> Draft | None:
        index = self._indices.get(session)
        if index is None:
            index = self._indices[session] = NgramIndex()
        index.extend(known)
        matches = index.matches(known, assumed) if limit > 0 else []
        if not matches:
            return None
        ids, grade = _draft(known, assumed, matches, limit)
        return Draft(session, len(known) + len(assumed), ids, grade)

    def forget(self, session: int) -> None:
        self._indices.pop(session, None)

    def close(self) -> None:
        self._indices.clear()


def _draft(
    known: Sequence[int], assumed: Sequence[int], matches: Sequence[NgramMatch], limit: int
) -> tuple[tuple[int, ...], int]:
    """The tokens that followed the longest match, and the grade."""
    best = max(matches)
    ids: list[int] = []
    for position in range(best.end, best.end + limit):
        # Past the known text it goes on through its own draft: what repeats with a period goes on repeating.
        ids.append(token_at(known, assumed, ids, position))
    following = [token_at(known, assumed, ids, other.end) for other in matches]
    return tuple(ids), _grade(best.length, following)


def _grade(length: int, following: Sequence[int]) -> int:
    """From the match's length; one up where several places agree on the next token, one down where they do not."""
    grade = sum(length >= bound for bound in (3, 5, 9))
    if len(following) > 1:
        grade += 1 if len(set(following)) == 1 else -1
    return min(max(grade, 0), GRADES - 1)
