"""Copies of KV for a planned move: who sends which layers' sessions to whom, and whether that came about.

First those who are to go on are told whom to expect, then those who serve are told to send; they answer when little is
left, and follow what is written until the chain is fenced off. Whatever fails on the way, the move goes on without: its
sessions are replayed, as after a loss.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardcompute.backends.exactness import parse_class
from shardcompute.control.actions import ConnectChain, CopyKv, StageAddress
from shardcompute.control.state import Assignment, ClusterState
from shardcompute.control.watch.kv_travel import estimate_travel
from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.node.coordinator.node_registry import NodeRegistry, await_answer
from shardcompute.node.rpc.commands import ExpectKv, KvHolder, OpenLinks, Peer, SendKv
from shardcompute.wire.control import CommandReply

log = logging.getLogger(__name__)
_COPY_S = 300.0
"""So long a move waits for sessions to travel, while the chain goes on as it is."""
_OPEN_S = 5.0
_MOST_NUMBERS = 1 << 31


@dataclass(frozen=True, slots=True)
class KvCopy:
    """What was sent, from the stages of one epoch to those of the next."""

    number: int
    epoch: int
    before: tuple[Assignment, ...]
    after: tuple[Assignment, ...]

    def serves(self, action: ConnectChain) -> bool:
        """Whether this is the move for which it was made."""
        stages = tuple(stage.assignment for stage in action.stages)
        is_next = action.epoch == self.epoch + 1
        return is_next and stages == self.after and action.used_stages == self.before


def copy_kv(action: CopyKv, state: ClusterState, registry: NodeRegistry, home: Peer) -> KvCopy:
    """Have sessions sent to where a chain is moving, whose results go to the driver at `home`. LinkError, and why,
    where they will be replayed instead. Waits for others: call it in the background."""
    opening = _open_links(action, registry, home)
    _check_alike(action, state)
    until_s = time.monotonic() + min(_COPY_S, _worth_waiting_s(action, state))
    number = secrets.randbelow(_MOST_NUMBERS - 1) + 1
    before = tuple(stage.assignment for stage in action.stages)
    new = [stage for stage in action.target if stage.assignment not in before]
    expected = [(stage.node, registry.ask(stage.node, _expectation(action, stage, number))) for stage in new]
    for node, answer in expected:
        await_answer(node, answer)
    sent = [
        (stage.node, registry.ask(stage.node, _sending(action, number, targets)))
        for stage in action.stages
        if (targets := _parts(stage, new))
    ]
    for node, answer in sent:
        await_answer(node, answer, max(0.0, until_s - time.monotonic()))
    for node, answer in opening:
        with contextlib.suppress(LinkError):  # it is missed when the chain is connected
            await_answer(node, answer, _OPEN_S)
    return KvCopy(number, action.epoch, before, tuple(stage.assignment for stage in action.target))


def _open_links(
    action: CopyKv, registry: NodeRegistry, home: Peer
) -> list[tuple[str, queue.SimpleQueue[CommandReply]]]:
    """Those that the new layout has and the present one has not: whom to wait for."""
    asked = []
    peers = [*(Peer(stage.node, stage.address) for stage in action.target), home]
    used = {(a.node, b.node) for a, b in pairwise(action.stages)} | {(action.stages[-1].node, home.node)}
    for index, stage in enumerate(action.target):
        wanted = [peers[index + 1], home]
        is_new = (stage.node, peers[index + 1].node) not in used
        if is_new and not stage.ranks:
            links = OpenLinks(list(dict.fromkeys(wanted)))
            asked.append((stage.node, registry.ask(stage.node, links)))
    return asked


def _worth_waiting_s(action: CopyKv, state: ClusterState) -> float:
    """LinkError where sessions are sooner computed again than sent."""
    travel = estimate_travel(state, state.chains[action.chain], [stage.assignment for stage in action.target])
    if not travel.pays:
        raise LinkError(travel.words)
    return travel.limit_s


def _expectation(action: CopyKv, stage: StageAddress, number: int) -> ExpectKv:
    sources = [
        KvHolder(Peer(each.node, each.address), max(each.start, stage.start), min(each.stop, stage.stop))
        for each in action.stages
        if each.start < stage.stop and stage.start < each.stop
    ]
    return ExpectKv(chain=action.chain, number=number, start=stage.start, stop=stage.stop, sources=sources)


def _sending(action: CopyKv, number: int, targets: list[KvHolder]) -> SendKv:
    return SendKv(chain=action.chain, epoch=action.epoch, number=number, targets=targets)


def _parts(stage: StageAddress, new: Sequence[StageAddress]) -> list[KvHolder]:
    """Those who take layers of a stage over."""
    return [
        KvHolder(Peer(each.node, each.address), each.start, each.stop)
        for each in new
        if each.start < stage.stop and stage.start < each.stop
    ]


def _check_alike(action: CopyKv, state: ClusterState) -> None:
    """LinkError unless all compute alike: rows of another class would not be those that a replay gives."""
    stages = (*action.stages, *action.target)
    if any(stage.ranks for stage in stages):
        raise LinkError("stages that several machines compute keep their sessions in parts")
    chain = state.chains.get(action.chain)
    if chain is None:
        raise LinkError("the chain is gone")
    model = state.models[chain.model].model
    nodes = {
        state.nodes[stage.node].id: state.nodes[stage.node] for stage in stages if stage.node in state.nodes
    }
    classes = {node.exactness_of(model) for node in nodes.values()}
    if len(classes) != 1 or parse_class(next(iter(classes))) is None:
        raise LinkError(
            f"its machines are of other exactness classes: {', '.join(sorted(classes)) or 'unknown'}"
        )


class KvCopies:
    """The newest copy of each chain. Of the coordinator's thread, but for what waits."""

    def __init__(self) -> None:
        self._copies: dict[str, KvCopy] = {}

    def run(self, action: CopyKv, state: ClusterState, registry: NodeRegistry, home: Peer) -> KvCopy | None:
        """In the background. None where sessions will be replayed, which the log says."""
        try:
            return copy_kv(action, state, registry, home)
        except ShardComputeError as error:
            log.info("chain %s: sessions will be replayed, not moved: %s", action.chain, error.message)
            return None

    def keep(self, chain: str, copy: KvCopy | None) -> None:
        if copy is None:
            self._copies.pop(chain, None)
        else:
            self._copies[chain] = copy

    def number_for(self, action: ConnectChain) -> int:
        """Of the copy with which a new epoch goes on; 0: there is none."""
        copy = self._copies.get(action.chain)
        return copy.number if copy is not None and copy.serves(action) else 0
