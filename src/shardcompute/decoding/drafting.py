"""Drafters: whatever proposes how a session goes on, cheaply and often enough right.

Drafts are verified by the model itself: a token holds if it is what the last stage picks. So a drafter can make an
answer faster or slower but never different. It says how sure it is by a grade; how much each grade is worth is
measured, not believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardcompute.core.steps import Draft, Opening

GRADES = 4
"""Grades are 0 (a wild guess) to `GRADES - 1` (nearly certain)."""
HEAD_DRAFTER = "head"
"""Names the drafter whose drafts the last stage makes."""


def likelihood_of(token: int, logits: npt.NDArray[np.float32]) -> float:
    """How likely a token is in the eyes of whoever made these logits."""
    best = logits.max()
    return float(np.exp(logits[token] - best) / np.exp(logits - best).sum())


def grade_of(sureness: float, bounds: Sequence[float]) -> int:
    """One higher for each bound, of which there are one fewer than grades, that is reached."""
    return sum(sureness >= bound for bound in bounds)


class Drafter(Protocol):
    """Drafts for all sessions of one driver. One caller at a time.

    `is_slow`: a call takes milliseconds, so no lock may be held over it.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_slow(self) -> bool: ...

    def propose(
        self, session: int, known: Sequence[int], assumed: Sequence[int], limit: int, opening: Opening
    ) -> Draft | None:
        """At most `limit` tokens, and at least one, that may follow `known` and `assumed`; None: nothing to offer.

        `known`, the prompt and the committed tokens, only ever grows for a session. `assumed` are drafted tokens
        that are already being verified; they may be taken back. Neither is changed or kept.
        """
        ...

    def forget(self, session: int) -> None:
        """The session is over; unknown sessions are ignored."""
        ...

    def close(self) -> None:
        """Free what it holds; it is not asked again."""
        ...


IsWanted = Callable[[], bool]
"""Asked after every token, from the drafter's thread."""


@runtime_checkable
class PatientDrafter(Protocol):
    """A slow drafter that can be told to leave it at that, so that it may draft while nobody waits."""

    def propose_while(
        self, tokens: Sequence[int], known: int, limit: int, opening: Opening, is_wanted: IsWanted
    ) -> Draft | None:
        """As `Drafter.propose`, for the session of `opening`, of whose tokens the first `known` are known; but no more
        than was found when it is not wanted any more."""
        ...


@dataclass(slots=True, eq=False)
class DraftTask:
    """A draft that a slow drafter was asked for: to follow `tokens`, all that a session has at that moment. What comes
    of it is written by the drafter's thread, `is_done` last; all else is the driver's."""

    session: int
    drafter: str
    tokens: tuple[int, ...]
    is_wanted: bool = True
    is_done: bool = False
    draft: Draft | None = None
    seconds: float = 0.0

    def remainder(self, tokens: Sequence[int]) -> Draft | None:
        """What of the draft is still to come, now that these are the session's tokens; None: nothing, or it went
        another way."""
        if self.draft is None or len(tokens) < len(self.tokens):
            return None
        whole = (*self.tokens, *self.draft.ids)
        rest = whole[len(tokens) :]
        if not rest or whole[: len(tokens)] != tuple(tokens):
            return None
        return replace(self.draft, start=len(tokens), ids=rest)

    @property
    def token_s(self) -> float:
        """What drafting one token took."""
        return self.seconds / max(1, 0 if self.draft is None else len(self.draft.ids))
