"""Whose session it is: every driver numbers its sessions in a range of its own.

A range is chosen at random when a driver's process starts, so sessions of a former life are never taken for new
ones. Frames therefore need not say who sent them: stages know whom to answer, and whose memory to free.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from shardcompute.node.driver.chain_port import Resumption

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


def resumption_within(resumption: Resumption | None, sessions: int) -> Resumption | None:
    """What a chain still knows of one driver's sessions."""
    if resumption is None:
        return None
    lengths = resumption.lengths
    return Resumption(
        None if lengths is None else {id: lengths[id] for id in within(sessions, lengths)},
        resumption.has_new_first,
        frozenset(within(sessions, resumption.held)),
    )
