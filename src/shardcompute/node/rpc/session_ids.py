"""Whose session it is: every driver numbers its sessions in a range of its own.

A range is chosen at random when a driver's process starts, so sessions of a former life are never taken for new
ones. Frames therefore need not say who sent them: stages know whom to answer, and whose memory to free.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MOST_RANGES = 1 << 31
_BITS = 32


def choose_range() -> int:
    return secrets.randbelow(MOST_RANGES - 1) + 1


def first_session(sessions: int) -> int:
    return (sessions << _BITS) + 1


def range_of(session: int) -> int:
    return session >> _BITS


def within(sessions: int, ids: Iterable[int]) -> list[int]:
    """Those of a range."""
    return [session for session in ids if range_of(session) == sessions]


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a repaired chain still knows: sessions and how many tokens of each (None: all of all). `has_new_first`:
    its first stage knows nothing yet and must be told the tokens. `held`: sessions that some stage has memory for,
    perhaps in vain."""

    lengths: Mapping[int, int] | None = None
    has_new_first: bool = False
    held: frozenset[int] = frozenset()

    def within(self, sessions: int) -> Resumption:
        """The same of one driver's sessions alone."""
        lengths = self.lengths
        return Resumption(
            None if lengths is None else {id: lengths[id] for id in within(sessions, lengths)},
            self.has_new_first,
            frozenset(within(sessions, self.held)),
        )
