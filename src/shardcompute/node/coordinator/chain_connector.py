"""How a chain gets its next epoch: every stage is told its place, then the coordinator's driver dials the first.

Stages that are to be told what they missed must be in place before whoever tells them, so these come last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardcompute.control.actions import ActivateChain, AttachDriver, ConnectChain
from shardcompute.control.state import ClusterState
from shardcompute.node.coordinator.driver_port import OwnDriver
from shardcompute.node.coordinator.node_registry import NodeRegistry, await_answer
from shardcompute.node.coordinator.session_recovery import RecoveryPlan, plan_recovery
from shardcompute.node.rpc.commands import Attach, Connect, Connected, Peer, Wire, decode_connected
from shardcompute.node.rpc.session_ids import Resumption
from shardcompute.wire.codecs.mode import EXACT

WireOf = Callable[[str, str], Wire]
"""How activations go from one node to another."""


@dataclass(frozen=True, slots=True)
class ConnectedEpoch:
    """What is in flight of an epoch that was connected: which sessions it can go on with, until drivers were told.

    No part of the state: sessions never enter it, and no epoch outlives the coordinator that connected it.
    """

    epoch: int
    resumption: Resumption | None
    """What its stages still knew; None: nothing, all sessions are computed again."""
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
    action: ConnectChain, driver: OwnDriver, registry: NodeRegistry, wire_of: WireOf
) -> ConnectedEpoch:
    """Connect a new epoch. Raises LinkError. Waits for others: call it in the background."""
    plan = plan_recovery(action.used_stages, action.stages)
    commands = _commands(action, driver, plan, wire_of)
    answers: dict[int, Connected] = {}
    for replays in (False, True):
        asked = {
            index: registry.ask(action.stages[index].node, command)
            for index, command in enumerate(commands)
            if command.replays is replays
        }
        for index, answer in asked.items():
            answers[index] = decode_connected(await_answer(action.stages[index].node, answer))
    driver.open_chain(attach_command(action))
    resumption = None if plan is None else plan.resumption([answers[i] for i in range(len(commands))])
    return ConnectedEpoch(action.epoch, resumption)


def attach_command(
    action: ConnectChain | ActivateChain | AttachDriver, resumption: Resumption | None = None
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
    )


def _commands(
    action: ConnectChain, driver: OwnDriver, plan: RecoveryPlan | None, wire_of: WireOf
) -> list[Connect]:
    own = Peer(driver.node, driver.url)
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
            replays=plan is not None and index + 1 in plan.new,
            wire=wire_of(stage.node, ring[index + 1].node),
        )
        for index, stage in enumerate(action.stages)
    ]


def wire_between(state: ClusterState, mode: str, sender: str, receiver: str) -> Wire:
    """What a stage is told about the link to the next one."""
    link, node = state.link(sender, receiver), state.nodes.get(receiver)
    codecs = (EXACT,) if node is None else node.codecs
    if link is None:
        return Wire(mode, codecs)
    return Wire(mode, codecs, link.rtt_s, link.bytes_per_s)
