"""Prefix routing: which of several chains a request goes to. Pure.

A chain that has kept the beginning of a prompt need not compute it again; one that has less to do answers sooner. Both
are counted in tokens of a prompt: those that would have to be computed, and as many for each session that is there
already. So a long beginning is worth some company, a short one is not, and without any the least busy chain is chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardcompute.core.generation import GenerationRequest
from shardcompute.node.driver.sessions.prefix_cache import SHORTEST

SESSION_TOKENS = 256
"""So many tokens of a prompt are computed in the time for which a session more holds up the others, about."""
_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class ChainOffer:
    """What a chain would do for a request."""

    kept_tokens: int
    """Of the prompt's beginning, what need not be computed."""
    sessions: int
    """That run or wait there."""

    def cost(self, prompt_tokens: int) -> int:
        return max(0, prompt_tokens - self.kept_tokens) + SESSION_TOKENS * self.sessions


def choose_chain(offers: Mapping[str, ChainOffer], prompt_tokens: int) -> str:
    """The chain that has the least to do for it and for others; of equals the first."""
    return min(offers, key=lambda name: offers[name].cost(prompt_tokens))


@dataclass(slots=True)
class SentPrompts:
    """Prompts that went to a chain whose driver is elsewhere: what that one keeps of them can only be guessed."""

    _newest: deque[tuple[tuple[str, str, str], npt.NDArray[np.int64]]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED)
    )

    def add(self, request: GenerationRequest) -> None:
        self._newest.append((request.prefix_scope, np.asarray(request.prompt, dtype=np.int64)))

    def kept_tokens(self, request: GenerationRequest) -> int:
        """The longest beginning that one of them shares with this; those with pictures share none."""
        if request.pictures:
            return 0
        wanted = np.asarray(request.prompt[:-1], dtype=np.int64)
        shared = [_common(wanted, ids) for scope, ids in self._newest if scope == request.prefix_scope]
        longest = max(shared, default=0)
        return longest if longest >= SHORTEST else 0


def _common(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length
