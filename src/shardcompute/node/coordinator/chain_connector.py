"""How a chain gets its next epoch: every stage is told its place, then the coordinator's driver dials the first.

Stages that are to be told what they missed must be in place before whoever tells them, so these come last.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shardcompute.control.actions import ActivateChain, AttachDriver, ConnectChain, StageAddress
from shardcompute.control.state import Assignment, ClusterState, RankPlace
from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.driver_port import OwnDriver
from shardcompute.node.coordinator.node_registry import NoAnswerError, NodeRegistry, await_answer
from shardcompute.node.coordinator.session_recovery import RecoveryPlan, plan_migration, plan_recovery
from shardcompute.node.rpc.commands import (
    UNCHANGED,
    Attach,
    Connect,
    Connected,
    Peer,
    ShapeChange,
    StepLimits,
    StepTraced,
    TraceStep,
    Wire,
    decode_connected,
    decode_traced,
)
from shardcompute.node.rpc.session_ids import Resumption
from shardcompute.wire.codecs.mode import EXACT
from shardcompute.wire.control import CommandReply

WireOf = Callable[[str, str], Wire]
"""How activations go from one node to another."""


class StuckStageError(LinkError):
    """A stage's machine is there, and its computing thread does not come back from what it does."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}", hint="restart that worker; its log says with what")
        self.node = node
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ConnectedEpoch:
    """What is in flight of an epoch that was connected: which sessions it can go on with, until drivers were told.

    No part of the state: sessions never enter it, and no epoch outlives the coordinator that connected it.
    """

    epoch: int
    resumption: Resumption | None
    """What its stages still knew; None: nothing, all sessions are computed again."""
    change: ShapeChange = UNCHANGED
    """What drivers tell those who waited for it."""
    limits: StepLimits = field(default_factory=StepLimits)
    told: set[int] = field(default_factory=set)
    """The other drivers, by the namespace of their sessions, that have been told of it."""

    def known_of(self, namespace: int) -> Resumption | None:
        """What the stages knew of one driver's sessions."""
        return None if self.resumption is None else self.resumption.within(namespace)

    def resume(self, namespace: int, answers: Sequence[Connected]) -> Resumption | None:
        """What a driver is told of its sessions, given what stages that let it in hold of them now."""
        if namespace in self.told:
            # It has used this epoch before: what its stages hold now is what they know.
            return RecoveryPlan(frozenset()).resumption(answers)
        self.told.add(namespace)
        return self.known_of(namespace)


def connect_epoch(
    action: ConnectChain,
    driver: OwnDriver,
    registry: NodeRegistry,
    wire_of: WireOf,
    change: ShapeChange = UNCHANGED,
    kv_copy: int = 0,
) -> ConnectedEpoch:
    """Connect a new epoch, whose new stages were sent sessions by `kv_copy` (0: by none). Raises LinkError,
    StuckStageError for a stage that does not answer because it is stuck. Waits: call it in the background."""
    recover = plan_migration if kv_copy else plan_recovery
    plan = recover(action.used_stages, action.stages)
    commands = _commands(action, driver, plan, wire_of, kv_copy)
    answers: dict[int, Connected] = {}
    for replays in (False, True):
        # Ranks of a stage meet each other: all of them are told at once.
        asked = [
            (index, rank, node, registry.ask(node, told))
            for index, command in enumerate(commands)
            if command.replays is replays
            for rank, (node, told) in enumerate(_by_member(action.stages[index], command))
        ]
        for index, rank, node, answer in asked:
            connected = _await_connected(registry, node, answer)
            if rank == 0:
                answers[index] = connected
    driver.open_chain(attach_command(action))
    resumption = None if plan is None else plan.resumption([answers[i] for i in range(len(commands))])
    return ConnectedEpoch(action.epoch, resumption, change, joint_limits([*answers.values()]))


def joint_limits(answers: Sequence[Connected]) -> StepLimits:
    """What all stages of a chain can do in one step."""
    limits = [answer.limits for answer in answers]
    return StepLimits(
        min(each.max_rows for each in limits),
        min(each.max_logit_rows for each in limits),
        len(limits) == 1 and limits[0].can_continue,
    )


def change_of(state: ClusterState, action: ConnectChain) -> ShapeChange:
    """Whose stages an epoch does without, and who computes layers in it that others did, or that it had lost."""
    chain = state.chains.get(action.chain)
    used = {each for stage in action.used_stages for each in _parts_of(stage)}
    away = [node for stage in action.used_stages for node in stage.members if not _is_well(state, node)]
    lost = dict.fromkeys([*(() if chain is None else chain.lost), *away])
    parts = [each for stage in action.stages for each in _parts_of(stage.assignment)]
    new = [part[0] for part in parts if used and (part not in used or part[0] in lost)]
    called = {id: node.name for id, node in state.nodes.items()}
    return ShapeChange(
        tuple(called.get(node, node) for node in lost), tuple(called.get(node, node) for node in new)
    )


def _parts_of(stage: Assignment) -> list[tuple[str, int, int, RankPlace | None]]:
    return [(node, stage.start, stage.stop, stage.place_of(node)) for node in stage.members]


def _is_well(state: ClusterState, node_id: str) -> bool:
    node = state.nodes.get(node_id)
    return node is not None and node.is_live and node.status != "suspected"


def _await_connected(registry: NodeRegistry, node: str, answer: queue.SimpleQueue[CommandReply]) -> Connected:
    """What a stage answers. It may first have a long step to end, and much to tell the next one: it is waited for as
    long as it gets on with that."""
    done = -1
    while True:
        try:
            return decode_connected(await_answer(node, answer))
        except LinkError as error:
            seen = look_at(registry, node)
            if seen is not None and seen.is_stuck:
                raise StuckStageError(node, f"it is stuck in a step for {seen.busy_s:.0f} s") from error
            is_at_work = seen is not None and (seen.busy_s > 0 or seen.done > done)
            if not isinstance(error, NoAnswerError) or seen is None or not is_at_work:
                raise
            done = seen.done


def look_at(registry: NodeRegistry, node: str) -> StepTraced | None:
    """How the computing thread of a worker is getting on; None where it does not say."""
    command = TraceStep(chain="", epoch=0, session_namespace=0, sequence=0, sender="")
    try:
        return decode_traced(await_answer(node, registry.ask(node, command)))
    except LinkError:
        return None


def attach_command(
    action: ConnectChain | ActivateChain | AttachDriver,
    resumption: Resumption | None = None,
    change: ShapeChange = UNCHANGED,
    limits: StepLimits | None = None,
) -> Attach:
    """What any driver is told of an epoch that it is to use."""
    first = action.stages[0]
    return Attach(
        chain=action.chain,
        epoch=action.epoch,
        model=action.model,
        first=Peer(first.node, first.address),
        nodes=[stage.node for stage in action.stages],
        kv_tokens=action.kv_tokens,
        resumption=resumption,
        change=change,
        limits=limits or StepLimits(),
    )


def _commands(
    action: ConnectChain, driver: OwnDriver, plan: RecoveryPlan | None, wire_of: WireOf, kv_copy: int
) -> list[Connect]:
    own, running = Peer(driver.node, driver.url), driver.running_sessions(action.chain)
    ring = [*(Peer(stage.node, stage.address) for stage in action.stages), own]
    return [
        Connect(
            chain=action.chain,
            epoch=action.epoch,
            start=stage.start,
            stop=stage.stop,
            next=ring[index + 1],
            previous_node=ring[index - 1].node,
            driver=own,
            session_namespace=driver.session_namespace,
            kv_tokens=action.kv_tokens,
            is_last=index == len(action.stages) - 1,
            keeps_sessions=plan is not None and index not in plan.new,
            replays=(replays := plan is not None and index + 1 in plan.new),
            running=running if replays else [],
            wire=wire_of(stage.node, ring[index + 1].node),
            kv_copy=kv_copy if plan is not None and index in plan.copied else 0,
        )
        for index, stage in enumerate(action.stages)
    ]


def _by_member(stage: StageAddress, command: Connect) -> list[tuple[str, Connect]]:
    """What each member of a stage is told, the one that leads first."""
    if not stage.ranks:
        return [(stage.node, command)]
    assignment, ranks = stage.assignment, [Peer(each.node, each.address) for each in stage.ranks]
    return [
        (node, msgspec.structs.replace(command, tensor=assignment.place_of(node), ranks=ranks))
        for node in assignment.members
    ]


def wire_between(state: ClusterState, mode: str, sender: str, receiver: str) -> Wire:
    """What a stage is told about the link to the next one."""
    link, node = state.link(sender, receiver), state.nodes.get(receiver)
    codecs = (EXACT,) if node is None else node.codecs
    if link is None:
        return Wire(mode, codecs)
    return Wire(mode, codecs, link.rtt_s, link.bytes_per_s)
