"""Head drafts at the driver: what last stages guessed along with their picks, kept until a session wants it."""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.core.steps import Foreseen, Opening
from shardcompute.decoding.drafting import GRADES, Draft


class ForeseenDrafter:
    """Offers the newest guesses for each session, as long as they begin where its known tokens end."""

    name = "ahead"
    is_slow = False

    def __init__(self) -> None:
        self._newest: dict[int, Foreseen] = {}

    def take(self, foreseen: Foreseen) -> None:
        self._newest[foreseen.session] = foreseen

    def has(self, session: int, known: Sequence[int]) -> bool:
        kept = self._newest.get(session)
        return kept is not None and kept.start == len(known)

    def propose(
        self, session: int, known: Sequence[int], assumed: Sequence[int], limit: int, opening: Opening
    ) -> Draft:
        kept = self._newest.get(session)
        if kept is None or assumed or kept.start != len(known):
            return Draft(())
        return Draft(kept.ids[:limit], min(kept.grade, GRADES - 1))

    def forget(self, session: int) -> None:
        self._newest.pop(session, None)

    def close(self) -> None:
        self._newest.clear()
