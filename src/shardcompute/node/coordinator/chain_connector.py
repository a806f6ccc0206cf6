"""How a chain gets its next shape: every stage is told its place, then the driver dials the first.

Stages that are to be told what they missed must be in place before whoever tells them, so these come last.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardcompute.control.actions import ConnectChain, StageAddress
from shardcompute.control.state import ClusterState
from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.driver_port import DriverPort
from shardcompute.node.coordinator.session_recovery import RecoveryPlan, plan_recovery
from shardcompute.node.rpc.commands import Connect, Connected, NodeCommand, Peer, Wire, decode_connected
from shardcompute.node.rpc.session_ids import Resumption
from shardcompute.wire.codecs.mode import EXACT
from shardcompute.wire.control import CommandReply

_TIMEOUT_S = 5.0
Ask = Callable[[str, NodeCommand], "queue.SimpleQueue[CommandReply]"]
WireOf = Callable[[str, str], Wire]
"""How activations go from one node to another."""


@dataclass(frozen=True, slots=True)
class ConnectedEpoch:
    """An epoch that was connected, and what its stages still knew."""

    epoch: int
    stages: tuple[StageAddress, ...]
    kv_tokens: int
    """Of the coordinator's own driver."""
    resumption: Resumption | None
    told: set[int] = field(default_factory=set)
    """The drivers, by the namespace of their sessions, that have been told of it."""


def connect_epoch(
    action: ConnectChain, before: Sequence[StageAddress], driver: DriverPort, ask: Ask, wire_of: WireOf
) -> Resumption | None:
    """Connect a new epoch; `before` is the last shape that was in use. Returns what is still known of its sessions,
    None for nothing. Raises LinkError. Waits for others: call it in a thread."""
    repair = plan_recovery(before, action.stages)
    orders = _orders(action, driver, repair, wire_of)
    answers: dict[int, Connected] = {}
    for replays in (False, True):
        asked = {
            index: ask(action.stages[index].node, order)
            for index, order in enumerate(orders)
            if order.replays is replays
        }
        for index, answer in asked.items():
            answers[index] = decode_connected(await_answer(action.stages[index].node, answer))
    driver.open_chain(action)
    return None if repair is None else repair.resumption([answers[i] for i in range(len(orders))])


def _orders(
    action: ConnectChain, driver: DriverPort, repair: RecoveryPlan | None, wire_of: WireOf
) -> list[Connect]:
    own = Peer(action.driver, driver.url)
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
            keeps_sessions=repair is not None and index not in repair.new,
            replays=repair is not None and index + 1 in repair.new,
            wire=wire_of(stage.node, ring[index + 1].node),
        )
        for index, stage in enumerate(action.stages)
    ]


def await_answer(node: str, answer: queue.SimpleQueue[CommandReply], timeout_s: float = _TIMEOUT_S) -> bytes:
    """What the node answered; LinkError if that is an error, or nothing in time."""
    try:
        answered = answer.get(timeout=timeout_s)
    except queue.Empty:
        raise LinkError(f"{node} did not answer in time") from None
    if answered.error:
        raise LinkError(f"{node}: {answered.error}")
    return answered.result


def wire_between(state: ClusterState, mode: str, sender: str, receiver: str) -> Wire:
    """What a stage is told about the link to the next one."""
    link, node = state.link(sender, receiver), state.nodes.get(receiver)
    codecs = (EXACT,) if node is None else node.codecs
    if link is None:
        return Wire(mode, codecs)
    return Wire(mode, codecs, link.rtt_s, link.bytes_per_s)
