"""Which sessions survive when a chain gets a new shape: those whose KV is still there, or can be replayed.

If the layers are cut as before and only machines changed, every stage that stayed goes on with its KV. A new stage is
told by its predecessor's log what it missed; a new first stage is told by the driver. Two new stages side by side
cannot be told: then the driver replays all tokens through the whole chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.control.actions import StageAddress
from shardcompute.node.commands import Connected
from shardcompute.node.driver import Resumption


@dataclass(frozen=True, slots=True)
class Repair:
    """A new shape that can go on with the sessions of the old one; `new` are the places with new machines."""

    new: frozenset[int]

    def resumption(self, connected: Sequence[Connected]) -> Resumption | None:
        """What is left, now that all stages have answered; None where a stage has lost its sessions after all."""
        lengths: dict[int, int] | None = None
        for index, answer in enumerate(connected):
            if index not in self.new and not answer.kept:
                return None
            if index + 1 in self.new:
                replayed = answer.replayed
                lengths = replayed if lengths is None else _shorter(lengths, replayed)
        return Resumption(lengths, has_new_first=0 in self.new)


def plan_repair(before: Sequence[StageAddress], after: Sequence[StageAddress]) -> Repair | None:
    """How to go on from one shape to the next; None: everything must be computed again."""
    if [(s.start, s.stop) for s in before] != [(s.start, s.stop) for s in after] or not before:
        return None
    new = frozenset(i for i, (old, now) in enumerate(zip(before, after, strict=True)) if old.node != now.node)
    if any(index - 1 in new for index in new):
        return None
    return Repair(new)


def _shorter(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    return {session: min(length, b[session]) for session, length in a.items() if session in b}
