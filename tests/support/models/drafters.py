"""Drafters for tests: they know the answer, and lie as often as they are told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardcompute.core.steps import Draft, Opening


@dataclass
class Oracle:
    """Proposes what `answer` says follows a prompt; `is_wrong(position)` says where to propose something else."""

    answer: Callable[[tuple[int, ...]], Sequence[int]]
    is_wrong: Callable[[int], bool] = lambda position: False
    is_slow: bool = False
    name: str = "model"
    vocabulary: int = 26
    asked: int = 0
    forgotten: list[int] = field(default_factory=list)

    def propose(
        self, session: int, known: Sequence[int], assumed: Sequence[int], limit: int, opening: Opening
    ) -> Draft | None:
        self.asked += 1
        prompt = tuple(known[: opening.prompt_length])
        whole = [*prompt, *self.answer(prompt)]
        start = len(known) + len(assumed)
        ids = [
            (token + 1) % self.vocabulary if self.is_wrong(start + i) else token
            for i, token in enumerate(whole[start : start + limit])
        ]
        return Draft(session, start, tuple(ids)) if ids else None

    def close(self) -> None:
        """It holds nothing."""

    def forget(self, session: int) -> None:
        self.forgotten.append(session)
