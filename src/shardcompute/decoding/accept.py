"""When a drafted token counts: exactly when it is the token that the model's own sampling picks.

Since sampling is a pure function, a run with drafts gives the very tokens of a run without.
"""

from __future__ import annotations

from collections.abc import Sequence


def accept_drafts(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many drafts hold: the length of the common prefix of drafts and picks.

    `chosen[i]` was picked with `drafts[:i]` as its last tokens, so picks after the first difference are void.
    The pick at the returned index, where there is one, is the token that follows the accepted drafts.
    """
    for index, (draft, pick) in enumerate(zip(drafts, chosen, strict=False)):
        if draft != pick:
            return index
    return min(len(drafts), len(chosen))
