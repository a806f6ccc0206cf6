"""Drivers beside the coordinator's own: which chains they use, with how much of the memory, how far round.

Some are processes of their own and use every chain; one may be hosted by a worker, for one chain (see
`driver_placement`). A chain's KV memory is shared out evenly, but for the coordinator's driver while another works in
its place. Whoever has too much gives up some before anybody gets more, and nothing is given while a driver that is
gone still holds some. All of it follows from the state alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from msgspec.structs import replace

from shardcompute.control.actions import (
    Action,
    AttachDriver,
    DetachDriver,
    RankAddress,
    ShareMemory,
    StageAddress,
)
from shardcompute.control.driver_placement import HOME, ring_s
from shardcompute.control.state import Assignment, Attachment, Chain, ClusterState, Node
from shardcompute.control.transitions.state_updates import with_chain


def live_drivers(state: ClusterState) -> list[Node]:
    """The drivers that are processes of their own, by id."""
    nodes = (state.nodes[id] for id in sorted(state.nodes))
    return [node for node in nodes if node.can_drive and node.is_live]


def drivers_beside(state: ClusterState, chain: Chain) -> list[Node]:
    """All that should use this chain beside the coordinator's own driver."""
    host = state.nodes.get(chain.driver_host)
    return [*live_drivers(state), *([host] if host is not None and _hosts(chain, host) else [])]


def _hosts(chain: Chain, node: Node) -> bool:
    return node.id == chain.driver_host != HOME and node.is_live and node.can_host and not node.quarantine


def kv_share(state: ClusterState, chain: Chain, driver: str) -> int:
    """KV tokens that a driver of a chain should have.

    Where another sits in its place the coordinator's own needs enough for one whole context, no more: it takes over
    what a host leaves unfinished. All that it can spare is the host's.
    """
    model, others = state.models[chain.model].model, drivers_beside(state, chain)
    even = model.kv_tokens // (1 + len(others))
    if not any(_hosts(chain, node) for node in others):
        return even
    own = min(even, model.context_length)
    if driver == state.driver:
        return own
    return model.kv_tokens - own - even * (len(others) - 1) if driver == chain.driver_host else even


def own_kv_tokens(state: ClusterState, chain: Chain) -> int:
    """KV tokens that the stages of a connected chain keep for the coordinator's own driver."""
    own = (each.kv_tokens for each in chain.drivers if each.driver == state.driver)
    return next(own, kv_share(state, chain, state.driver))


def all_drivers(state: ClusterState) -> list[tuple[str, int]]:
    """Everybody who drives, or may, with the namespace of its sessions: the coordinator's own driver (0), those in
    processes of their own, and workers that can host one."""
    nodes = [state.nodes[id] for id in sorted(state.nodes)]
    others = [(n.id, n.session_namespace) for n in nodes if n.is_live and (n.can_drive or n.can_host)]
    return [(state.driver, 0), *others]


def stage_addresses(state: ClusterState, stages: Sequence[Assignment]) -> tuple[StageAddress, ...]:
    return tuple(
        StageAddress(
            stage.node,
            state.nodes[stage.node].address,
            stage.start,
            stage.stop,
            tuple(
                RankAddress(seat.node, state.nodes[seat.node].address, seat.weight) for seat in stage.ranks
            ),
            stage.exchange,
        )
        for stage in stages
    )


def driver_commands(state: ClusterState) -> Iterator[Action]:
    """What is to be done for every driver to use every chain that serves."""
    for chain in state.live_chains():
        if chain.status == "ready" and not chain.is_interrupted and chain.connected_epoch == chain.epoch:
            yield from _commands_of(state, chain)


def _commands_of(state: ClusterState, chain: Chain) -> Iterator[Action]:
    beside = drivers_beside(state, chain)
    shares = {driver: kv_share(state, chain, driver) for driver in (state.driver, *(n.id for n in beside))}
    gone = [each for each in chain.drivers if not _is_there(state, chain, each)]
    current = [each for each in chain.drivers if each.epoch == chain.epoch and each not in gone]
    greedy = [each for each in current if each.kv_tokens > shares[each.driver]]
    for each in gone:
        yield DetachDriver(chain.id, chain.epoch, each.driver, each.session_namespace, chain.nodes)
    for each in greedy:
        yield ShareMemory(
            chain.id, chain.epoch, each.driver, each.session_namespace, shares[each.driver], chain.nodes
        )
    if gone or greedy:
        return
    for each in current:
        if each.kv_tokens < shares[each.driver]:
            yield ShareMemory(
                chain.id, chain.epoch, each.driver, each.session_namespace, shares[each.driver], chain.nodes
            )
    attached = {(each.driver, each.session_namespace) for each in current}
    for node in beside:
        if node.is_answering and (node.id, node.session_namespace) not in attached:
            yield AttachDriver(
                chain=chain.id,
                epoch=chain.epoch,
                model=chain.model,
                driver=node.id,
                session_namespace=node.session_namespace,
                kv_tokens=shares[node.id],
                stages=stage_addresses(state, chain.stages),
                is_hosted=node.can_work,
            )


def _is_there(state: ClusterState, chain: Chain, attachment: Attachment) -> bool:
    if attachment.driver == state.driver:
        return True
    node = state.nodes.get(attachment.driver)
    if node is None or not node.is_live or node.session_namespace != attachment.session_namespace:
        return False
    return node.can_drive or _hosts(chain, node)


def with_attachment(chain: Chain, attachment: Attachment) -> Chain:
    """The chain with this driver, in place of what was known of it before."""
    place = (attachment.driver, attachment.session_namespace)
    others = [each for each in chain.drivers if (each.driver, each.session_namespace) != place]
    drivers = sorted((*others, attachment), key=lambda each: (each.driver, each.session_namespace))
    return replace(chain, drivers=tuple(drivers))


def loosen_drivers(state: ClusterState, a: str, b: str) -> ClusterState:
    """The link between two nodes broke: where one of them is a driver of the other's chain, it must be connected
    anew. Nobody else is concerned. A host's link to its own layers has two equal ends."""
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
    if each.driver == state.driver or each.driver not in (a, b):
        return False
    return (b if each.driver == a else a) in chain.nodes


def round_trip_s(state: ClusterState, chain: Chain, driver: str) -> float | None:
    """How long a row is on the wire from this driver through the chain and back, by what was measured; None where
    a link of it was not, or is closed."""
    seconds = ring_s(state, chain.nodes, driver)
    return None if seconds is None or seconds == inf else seconds
