"""Which sessions survive when a chain gets a new shape: those whose KV is still there, or can be replayed.

If the layers are cut as before and only machines changed, every stage that stayed goes on with its KV. A new stage is
told by its predecessor's log what it missed; a new first stage is told by the driver. Two new stages side by side
cannot be told: then the driver replays all tokens through the whole chain. Where the chain has moved as planned, new
stages, whatever their cuts, were sent the KV of those before them (`kv_copies`): all go on as if they had stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.control.actions import StageAddress
from shardcompute.control.state import Assignment, new_stages
from shardcompute.node.rpc.commands import Connected
from shardcompute.node.rpc.session_ids import Resumption


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """A new shape that can go on with the sessions of the old one; `new` are the places with new machines that must be
    told, `copied` those that were sent what they need."""

    new: frozenset[int]
    copied: frozenset[int] = frozenset()

    def resumption(self, connected: Sequence[Connected]) -> Resumption:
        """What is left, now that all stages have answered.

        A session goes on as far as every stage knows it, by its own KV or by its predecessor's replay. A stage that
        has lost its sessions after all knows none.
        """
        lengths: dict[int, int] | None = None
        for index, answer in enumerate(connected):
            if index not in self.new:
                lengths = _shorter(lengths, answer.held if answer.kept else {})
            if index + 1 in self.new:
                lengths = _shorter(lengths, answer.replayed)
        held = frozenset(session for answer in connected for session in answer.held)
        return Resumption(lengths, has_new_first=0 in self.new, held=held)


def plan_recovery(before: Sequence[Assignment], after: Sequence[StageAddress]) -> RecoveryPlan | None:
    """How to go on from one shape to the next; None: everything must be computed again."""
    new = new_stages(before, [stage.assignment for stage in after])
    return None if new is None else RecoveryPlan(new)


def plan_migration(before: Sequence[Assignment], after: Sequence[StageAddress]) -> RecoveryPlan:
    """How to go on where every stage that is not as before was sent its sessions."""
    stages = enumerate(stage.assignment for stage in after)
    return RecoveryPlan(frozenset(), frozenset(index for index, stage in stages if stage not in before))


def _shorter(a: dict[int, int] | None, b: dict[int, int]) -> dict[int, int]:
    if a is None:
        return dict(b)
    return {session: min(length, b[session]) for session, length in a.items() if session in b}
