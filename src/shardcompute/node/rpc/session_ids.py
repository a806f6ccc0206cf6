"""Whose session it is: every driver numbers its sessions in a namespace of its own.

A namespace is chosen at random when a driver's process starts, so sessions of a former life are never taken for new
ones. Frames therefore need not say who sent them: stages know whom to answer, and whose memory to free.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

MOST_NAMESPACES = 1 << 31
_BITS = 32


def choose_namespace() -> int:
    return secrets.randbelow(MOST_NAMESPACES - 1) + 1


def first_session(namespace: int) -> int:
    return (namespace << _BITS) + 1


def namespace_of(session: int) -> int:
    return session >> _BITS


def within(namespace: int, ids: Iterable[int]) -> list[int]:
    """Those of a namespace."""
    return [session for session in ids if namespace_of(session) == namespace]


class Resumption(msgspec.Struct, frozen=True):
    """What a repaired chain still knows: sessions and how many tokens of each (None: all of all). `has_new_first`:
    its first stage knows nothing yet and must be told the tokens. `held`: sessions that some stage has memory for,
    perhaps in vain."""

    lengths: dict[int, int] | None = None
    has_new_first: bool = False
    held: frozenset[int] = frozenset()

    def within(self, namespace: int) -> Resumption:
        """The same of one driver's sessions alone."""
        lengths = self.lengths
        return Resumption(
            None if lengths is None else {id: lengths[id] for id in within(namespace, lengths)},
            self.has_new_first,
            frozenset(within(namespace, self.held)),
        )
