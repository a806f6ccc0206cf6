"""Head drafts at the driver: what last stages drafted along with their picks, kept until a session wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardcompute.core.steps import Draft, Opening
from shardcompute.decoding.drafting import GRADES, HEAD_DRAFTER


class HeadDraftCache:
    """A `Drafter` that offers each session's newest head draft, as long as that begins where its known tokens end."""

    name = HEAD_DRAFTER
    is_slow = False

    def __init__(self) -> None:
        self._newest: dict[int, Draft] = {}

    def take(self, draft: Draft) -> None:
        self._newest[draft.session] = draft

    def has(self, session: int, known: Sequence[int]) -> bool:
        kept = self._newest.get(session)
        return kept is not None and kept.start == len(known)

    def propose(
        self, session: int, known: Sequence[int], assumed: Sequence[int], limit: int, opening: Opening
    ) -> Draft | None:
        kept = self._newest.get(session)
        if kept is None or assumed or kept.start != len(known):
            return None
        # The grade came over the wire.
        return replace(kept, ids=kept.ids[:limit], grade=min(kept.grade, GRADES - 1))

    def forget(self, session: int) -> None:
        self._newest.pop(session, None)

    def close(self) -> None:
        self._newest.clear()
