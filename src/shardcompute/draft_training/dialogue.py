"""Scripts and dialogues of self-play: what a model that talks to itself is to do, and what comes of it.

A script is what is given and what the model says, in turns; a conversation is the tokens of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


Script = Sequence[GivenTokens | ChosenTokens]


@dataclass(frozen=True, slots=True)
class SelfPlayDialogue:
    """Tokens of a session; those from `greedy_from` on are what the model found likeliest."""

    ids: tuple[int, ...]
    greedy_from: int
