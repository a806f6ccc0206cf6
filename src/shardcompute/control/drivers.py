"""Drivers beside the coordinator's own: which chains they use, with how much of the memory, how far round.

A chain's KV memory is shared out evenly. Whoever has too much gives up some before anybody gets more, and nothing
is given while a driver that is gone still holds some. All of it follows from the state alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from msgspec.structs import replace

from shardcompute.control.actions import Action, AttachDriver, DetachDriver, ShareMemory
from shardcompute.control.revisions import with_chain
from shardcompute.control.state import Attachment, Chain, ClusterState, Node


def live_drivers(state: ClusterState) -> list[Node]:
    """The drivers that are processes of their own, by id."""
    nodes = (state.nodes[id] for id in sorted(state.nodes))
    return [node for node in nodes if node.can_drive and node.is_live]


def kv_share(state: ClusterState, model: str) -> int:
    """KV tokens of each driver of a chain, the coordinator's own among them."""
    return state.models[model].model.kv_tokens // (1 + len(live_drivers(state)))


def driver_commands(state: ClusterState) -> Iterator[Action]:
    """What is to be done for every driver to use every chain that serves."""
    for chain in state.live_chains():
        if chain.status == "ready" and not chain.is_interrupted and chain.connected_epoch == chain.epoch:
            yield from _commands_of(state, chain)


def _commands_of(state: ClusterState, chain: Chain) -> Iterator[Action]:
    share = kv_share(state, chain.model)
    gone = [each for each in chain.drivers if not _is_there(state, each)]
    current = [each for each in chain.drivers if each.epoch == chain.epoch and each not in gone]
    greedy = [each for each in current if each.kv_tokens > share]
    for each in gone:
        yield DetachDriver(chain.id, chain.epoch, each.driver, each.sessions, chain.nodes)
    for each in greedy:
        yield ShareMemory(chain.id, chain.epoch, each.driver, each.sessions, share)
    if gone or greedy:
        return
    for each in current:
        if each.kv_tokens < share:
            yield ShareMemory(chain.id, chain.epoch, each.driver, each.sessions, share)
    attached = {(each.driver, each.sessions) for each in current}
    for node in live_drivers(state):
        if node.is_answering and (node.id, node.sessions) not in attached:
            yield AttachDriver(
                chain.id, chain.epoch, chain.model, node.id, node.address, node.sessions, share
            )


def _is_there(state: ClusterState, attachment: Attachment) -> bool:
    if attachment.driver == state.driver:
        return True
    node = state.nodes.get(attachment.driver)
    return node is not None and node.is_live and node.sessions == attachment.sessions


def with_attachment(chain: Chain, attachment: Attachment) -> Chain:
    """The chain with this driver, in place of what was known of it before."""
    place = (attachment.driver, attachment.sessions)
    others = [each for each in chain.drivers if (each.driver, each.sessions) != place]
    drivers = sorted((*others, attachment), key=lambda each: (each.driver, each.sessions))
    return replace(chain, drivers=tuple(drivers))


def loosen_drivers(state: ClusterState, a: str, b: str) -> ClusterState:
    """The link between two nodes broke: where one of them is a driver of the other's chain, it must be connected
    anew. Nobody else is concerned."""
    for chain in state.live_chains():
        loose = tuple(
            replace(each, epoch=0) if _is_between(state, chain, each, a, b) else each
            for each in chain.drivers
        )
        if loose != chain.drivers:
            state = with_chain(state, replace(chain, drivers=loose))
    return state


def _is_between(state: ClusterState, chain: Chain, each: Attachment, a: str, b: str) -> bool:
    """The coordinator's own driver is none of these: without it the chain itself needs a new epoch."""
    other = {a, b} - {each.driver}
    return each.driver != state.driver and each.driver in (a, b) and bool(other & set(chain.nodes))


def round_trip_s(state: ClusterState, chain: Chain, driver: str) -> float | None:
    """How long a row is on the wire from this driver through the chain and back, by what was measured; None where
    a link of it was not, or is closed."""
    ring = (driver, *chain.nodes, driver)
    links = [state.link(a, b) for a, b in pairwise(ring)]
    if any(link is None or not link.is_open for link in links):
        return None
    return sum(link.rtt_s / 2 for link in links if link is not None)
