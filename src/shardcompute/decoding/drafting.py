"""Drafters: whatever proposes how a session goes on, cheaply and often enough right.

Drafts are verified by the model itself: a token holds if it is what the last stage picks. So a drafter can make an
answer faster or slower but never different. It says how sure it is by a grade; how much each grade is worth is
measured, not believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
