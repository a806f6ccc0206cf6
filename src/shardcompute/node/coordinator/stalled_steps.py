"""Stalled steps: a driver misses a step's results, so every stage of the chain is asked where the step is.

What was lost on the way is recovered by ending the link that lost it: that interrupts the chain like any broken link,
and the next epoch goes on with the same tokens. A stage that is stuck inside a step, by its own measure, is replaced
and left alone with that model for a while. One that is only slow, or busy for others, is left in peace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardcompute.control import apply
from shardcompute.control.decisions import repair
from shardcompute.control.events import LinkBroken, StageStalled
from shardcompute.control.placement.place import Unplaceable
from shardcompute.control.state import Chain
from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.node.coordinator.coordinator_port import CoordinatorPort
from shardcompute.node.coordinator.driver_port import DriverPorts
from shardcompute.node.coordinator.node_registry import NodeRegistry, await_answer
from shardcompute.node.rpc.commands import ConfirmMissing, Redial, StepTraced, TraceStep, decode_traced
from shardcompute.wire.control import StepOverdue

log = logging.getLogger(__name__)
DRIVER = -1
"""The place of the driver in the ring, before the first stage and behind the last."""
_SECOND_LOOK_S = (0.3, 5.0)
_MOST_S = 1800.0
"""No step takes longer: whoever has it then is replaced, whatever it says."""
_WORTH_WAITING_S = 120.0
"""So long a stage that is stuck may come back where nobody could take its place."""


@dataclass(frozen=True, slots=True)
class LostOnTheWay:
    """The step went out at one place of the ring and never came to the other."""

    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class StuckStage:
    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Somebody has it who is not to blame yet."""

    reason: str


Finding = LostOnTheWay | StuckStage | UnderWay


def find_step(traces: Sequence[StepTraced | None], waited_s: float) -> Finding:
    """Where a step is that was sent `waited_s` ago, by what the stages say in order; None: no answer."""
    for stage, traced in enumerate(traces):
        following = stage + 1 if stage + 1 < len(traces) else DRIVER
        if traced is None:
            if waited_s > _MOST_S:
                return StuckStage(stage, "it does not say what it is doing")
            return UnderWay(f"stage {stage} does not answer")
        if traced.place == "sent":
            if traced.unsent:
                return UnderWay(f"stage {stage} is sending it")  # a link that takes nothing ends by itself
            continue
        if traced.place == "away":
            return LostOnTheWay(stage - 1 if stage else DRIVER, stage)
        if traced.place == "failed":
            return LostOnTheWay(stage, DRIVER)
        if traced.place == "dropped" or (traced.place == "sending" and traced.is_stuck):
            return LostOnTheWay(stage, following)
        if traced.is_stuck or waited_s > _MOST_S:
            return StuckStage(stage, f"it is stuck in a step for {max(traced.busy_s, 0.0):.0f} s")
        return UnderWay(f"stage {stage} is computing, for {traced.busy_s:.1f} s now")
    return LostOnTheWay(len(traces) - 1, DRIVER)


class StalledSteps:
    """`look_for` is called in the coordinator's thread; what waits for others happens in the background."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        registry: NodeRegistry,
        ports: DriverPorts,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._coordinator = coordinator
        self._registry = registry
        self._ports = ports
        self._pause = pause
        self._looking: set[str] = set()

    def look_for(self, overdue: StepOverdue, driver: str) -> None:
        """A node's driver misses a step. Of each chain one is looked for at a time: they are missed again."""
        chain = self._coordinator.state.chains.get(overdue.chain)
        if chain is None or chain.id in self._looking or not _is_current(chain, overdue):
            return
        if not self._drives(chain, driver, overdue.session_namespace):
            log.warning("%s misses a step of chain %s, which it does not drive", driver, chain.id)
            return
        self._looking.add(chain.id)
        self._coordinator.background(lambda: self._look(chain, overdue, driver))

    def _drives(self, chain: Chain, driver: str, namespace: int) -> bool:
        if driver == self._ports.own.node:
            return namespace == self._ports.own.session_namespace
        return any((each.driver, each.session_namespace) == (driver, namespace) for each in chain.drivers)

    # In the background

    def _look(self, chain: Chain, overdue: StepOverdue, driver: str) -> None:
        try:
            found = self._find(chain, overdue, driver)
            if not isinstance(found, UnderWay):
                found = self._look_again(chain, overdue, driver, found)
            log.info(
                "step %d of chain %s is missed since %.1f s: %s",
                overdue.sequence,
                chain.id,
                overdue.waited_s,
                found,
            )
            if isinstance(found, LostOnTheWay):
                self._redial(chain, driver, found)
            elif isinstance(found, StuckStage):
                self._coordinator.later(lambda: self._replace(chain, found, overdue.waited_s))
        finally:
            self._coordinator.later(lambda: self._looking.discard(chain.id))

    def _look_again(self, chain: Chain, overdue: StepOverdue, driver: str, found: Finding) -> Finding:
        """It may have been between two of them when they were asked; and whoever stood still for a while, the driver
        or a stage, finds that much time has passed before it goes on."""
        least_s, most_s = _SECOND_LOOK_S
        self._pause(min(max(overdue.allowed_s / 4, least_s), most_s))
        again = self._find(chain, overdue, driver)
        if not _is_same(found, again):
            return UnderWay("it has moved on")
        try:
            self._ports.find(driver).ask(ConfirmMissing(chain.id, overdue.epoch, overdue.sequence))
        except ShardComputeError as error:
            return UnderWay(error.message)
        return again

    def _find(self, chain: Chain, overdue: StepOverdue, driver: str) -> Finding:
        senders = [driver, *chain.nodes[:-1]]
        asked = [
            self._registry.ask(
                node,
                TraceStep(
                    chain=chain.id,
                    epoch=overdue.epoch,
                    session_namespace=overdue.session_namespace,
                    sequence=overdue.sequence,
                    sender=sender,
                ),
            )
            for node, sender in zip(chain.nodes, senders, strict=True)
        ]
        traces: list[StepTraced | None] = []
        for node, answer in zip(chain.nodes, asked, strict=True):
            try:
                traces.append(decode_traced(await_answer(node, answer)))
            except LinkError:
                traces.append(None)
        return find_step(traces, overdue.waited_s)

    def _redial(self, chain: Chain, driver: str, lost: LostOnTheWay) -> None:
        """Have the link ended by whoever sends over it; it is reported by that node like any that breaks."""
        sender = driver if lost.sender == DRIVER else chain.nodes[lost.sender]
        receiver = driver if lost.receiver == DRIVER else chain.nodes[lost.receiver]
        command = Redial(chain.id, receiver, by_driver=lost.sender == DRIVER)
        try:
            if sender == self._ports.own.node:
                self._ports.own.ask(command)
            else:
                await_answer(sender, self._registry.ask(sender, command))
        except LinkError as error:
            log.info("%s: %s", sender, error.message)
            self._coordinator.later(lambda: self._interrupt(chain, sender, receiver))

    # In the coordinator's thread

    def _interrupt(self, chain: Chain, sender: str, receiver: str) -> None:
        """The sender has no such link, or does not answer: the chain needs another epoch all the same."""
        known = self._coordinator.state.chains.get(chain.id)
        if known is not None and known.epoch == chain.epoch and not known.is_interrupted:
            if receiver == self._ports.own.node:
                sender, receiver = (
                    receiver,
                    sender,
                )  # the driver is no member: its links are known by the other end
            self._coordinator.apply(LinkBroken(sender, receiver, self._coordinator.now_s()))

    def _replace(self, chain: Chain, stuck: StuckStage, waited_s: float) -> None:
        state, now_s = self._coordinator.state, self._coordinator.now_s()
        known, node = state.chains.get(chain.id), state.nodes.get(chain.nodes[stuck.stage])
        if known is None or known.epoch != chain.epoch or known.is_interrupted or node is None:
            return
        stalled = StageStalled(node.id, node.incarnation, chain.id, stuck.reason, now_s)
        if waited_s < _WORTH_WAITING_S and isinstance(
            repair(apply(state, stalled), known, now_s), Unplaceable
        ):
            log.warning("%s in chain %s: %s; nobody can take its place", node.name, chain.id, stuck.reason)
            return
        log.warning("%s is replaced in chain %s: %s", node.name, chain.id, stuck.reason)
        self._coordinator.apply(stalled)


def _is_same(found: Finding, again: Finding) -> bool:
    if isinstance(found, StuckStage) and isinstance(again, StuckStage):
        return found.stage == again.stage
    return found == again


def _is_current(chain: Chain, overdue: StepOverdue) -> bool:
    return (
        chain.is_live
        and not chain.is_interrupted
        and chain.status == "ready"
        and chain.epoch == overdue.epoch
        and overdue.waited_s >= 0.0
        and overdue.allowed_s >= 0.0
    )
