"""Scripts and dialogues of self-play: what a model that talks to itself is to do, and what comes of it.

A script is what is given and what the model says, in turns; a dialogue is the tokens of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GIVEN, DRAWN, GREEDY = 0, 1, 2
"""Where a token came from: the script, chance, or the model's first choice."""


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Tokens that the model reads."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Tokens that the model chooses, up to a limit or to one of `stops`, which is kept only where nothing follows."""

    limit: int
    stops: frozenset[int]
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Script:
    """Turns, of which the first is given. One that ends with what is given is only read."""

    kind: str
    turns: tuple[GivenTokens | ChosenTokens, ...]

    @property
    def most_tokens(self) -> int:
        return sum(turn.limit if isinstance(turn, ChosenTokens) else len(turn.ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class SelfPlayDialogue:
    """Tokens of a session, and where each came from."""

    kind: str
    ids: NDArray[np.int32]
    origins: NDArray[np.uint8]
