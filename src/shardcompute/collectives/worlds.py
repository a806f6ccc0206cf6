"""Forming a world: who is which rank, under which epoch, and a connection between each two of them.

Each rank dials those before it and says which world, epoch and rank it is; whoever answers refuses others, old epochs
and wrong places. Who a peer is, is proven by the links (`wire`, certificates): `dial` and `accept` give such as were
checked, and here it is seen to that the node is the one of its rank.

A world that has failed is formed again under a higher epoch, over new connections; its members may have changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardcompute.collectives.fabric_group import FabricGroup, World
from shardcompute.collectives.fabrics.connection import PeerConnection
from shardcompute.collectives.fabrics.fabric import Fabric
from shardcompute.collectives.fabrics.frames import MOST_RANKS
from shardcompute.collectives.fabrics.link_fabric import LinkFabric
from shardcompute.collectives.fabrics.socket_fabric import SPIN_S, SocketFabric
from shardcompute.collectives.line_speeds import CROWDED_FRAME_S, FRAME_S
from shardcompute.collectives.measuring import measure_lines
from shardcompute.collectives.topology import AUTO, TopologyChoice
from shardcompute.core.errors import CollectiveError, LinkError, UsageError
from shardcompute.wire import JoinWorld, Link, Refused
from shardcompute.wire.socket_link import SocketLink

ROLE = "collective"
"""In which ranks dial each other."""
_RETRY_S = 0.05
_WORD_S = 2.0
"""A peer that has connected says who it is at once."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Somebody who dialled, and who it says it is."""

    link: Link
    word: JoinWorld


@dataclass(frozen=True, slots=True)
class Membership:
    """One forming of a world, as one rank sees it: the nodes of all ranks, by rank. A node is a rank once."""

    world: str
    epoch: int
    rank: int
    nodes: Sequence[str]

    def __post_init__(self) -> None:
        is_sound = 0 <= self.rank < len(self.nodes) <= MOST_RANKS and len(set(self.nodes)) == len(self.nodes)
        if not is_sound or not 0 < self.epoch < 1 << 32:
            raise UsageError(
                f"rank {self.rank} of {len(self.nodes)} cannot be, in epoch {self.epoch} of {self.world!r}",
                hint="count ranks from 0 and epochs from 1, and give every rank a node of its own",
            )

    @property
    def word(self) -> JoinWorld:
        return JoinWorld(self.world, self.epoch, self.rank)

    def judge(self, link: Link, word: JoinWorld) -> str | None:
        """Why whoever dialled is not the rank that it says, or None."""
        if word.world != self.world:
            return f"rank {self.rank} is of {self.world!r}, not of {word.world!r}"
        if word.epoch != self.epoch:
            return f"{self.world!r} is being formed under epoch {self.epoch}, not {word.epoch}"
        if not self.rank < word.rank < len(self.nodes) or self.nodes[word.rank] != link.peer:
            return f"{link.peer!r} is not rank {word.rank} of {self.world!r}, or should not dial rank {self.rank}"
        return None


def connect_world(
    membership: Membership,
    dial: Callable[[int], Link],
    accept: Callable[[float], Arrival],
    *,
    topology: TopologyChoice = AUTO,
    timeout_s: float = 30.0,
    spin_s: float | None = None,
) -> FabricGroup:
    """Meet all ranks of a world within `timeout_s`, and measure the lines between them. `spin_s` is how long a rank
    looks for frames before it sleeps; None: as long as suits the machine.

    `dial` connects to the node of a rank (`LinkError` if it does not answer: it is tried again), `accept` waits so
    many seconds for a node that dials us (`TimeoutError`), with its first word. `CollectiveError` names the first rank
    that did not come.
    """
    deadline = time.monotonic() + timeout_s
    links: dict[int, Link] = {}
    try:
        _meet_all(membership, links, dial, accept, deadline)
        return form_world(membership, links, topology, spin_s)
    except BaseException:
        for link in links.values():
            link.close()
        raise


def _meet_all(
    membership: Membership,
    links: dict[int, Link],
    dial: Callable[[int], Link],
    accept: Callable[[float], Arrival],
    deadline: float,
) -> None:
    """Until `links` has all other ranks."""
    try:
        for rank in range(membership.rank):
            links[rank] = _dial(membership, rank, dial, deadline)
        while len(links) < len(membership.nodes) - 1:
            arrival = accept(max(0.0, deadline - time.monotonic()))
            link, rank = arrival.link, _answer(membership, arrival)
            if rank in links:
                # It dialled again, because the first connection failed at its end.
                links[rank].close()
            if rank >= 0:
                links[rank] = link
    except (TimeoutError, LinkError) as error:
        missing = next(rank for rank in range(len(membership.nodes)) if rank not in {membership.rank, *links})
        raise CollectiveError(
            f"{membership.world!r} was not formed on rank {membership.rank}: rank {missing} did not come: {error}",
            hint="check that every rank is running and forms the same epoch",
            rank=missing,
            operation="form",
            sequence=0,
        ) from error


def form_world(
    membership: Membership,
    links: Mapping[int, Link],
    topology: TopologyChoice = AUTO,
    spin_s: float | None = None,
) -> FabricGroup:
    """The group of all ranks over links to each of the others, which it takes over. Every rank calls it: the lines
    are measured."""
    is_crowded = 1 + sum(map(_is_here, links.values())) > _cores()
    if spin_s is None:
        spin_s = 0.0 if is_crowded else SPIN_S
    fabric = open_fabric(membership, links, spin_s)
    world = World(fabric, frame_s=CROWDED_FRAME_S if is_crowded else FRAME_S)
    group = FabricGroup(world, topology, name=membership.world)
    try:
        measure_lines(group)
    except BaseException:
        group.close()
        raise
    return group


def open_fabric(membership: Membership, links: Mapping[int, Link], spin_s: float = SPIN_S) -> Fabric:
    """Over the links' sockets where all have one to give, else over the links."""
    sockets = {rank: link for rank, link in links.items() if isinstance(link, SocketLink)}
    if len(sockets) < len(links):
        return LinkFabric(membership.rank, membership.epoch, links)
    connections: dict[int, PeerConnection] = {}
    try:
        for rank, link in sockets.items():
            connections[rank] = PeerConnection(rank, *link.detach())
    except BaseException:
        # One was closed meanwhile. A link no longer closes a socket that it has given away.
        for connection in connections.values():
            connection.close()
        raise
    return SocketFabric(membership.rank, membership.epoch, connections, spin_s)


def _is_here(link: Link) -> bool:
    """Whether the other end is a process of this machine."""
    if not isinstance(link, SocketLink):
        return False
    return link.is_local or link.has_one_host


def _cores() -> int:
    """That this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _dial(membership: Membership, rank: int, dial: Callable[[int], Link], deadline: float) -> Link:
    """Until it answers as it should: ranks do not come to a new epoch at the same time."""
    while True:
        try:
            return _introduce(membership, rank, dial(rank))
        except (LinkError, TimeoutError):
            if time.monotonic() + _RETRY_S > deadline:
                raise
            time.sleep(_RETRY_S)


def _introduce(membership: Membership, rank: int, link: Link) -> Link:
    try:
        if link.peer != membership.nodes[rank]:
            raise LinkError(f"{link.peer!r} answers where rank {rank} is {membership.nodes[rank]!r}")
        link.send(membership.word)
        answer, _ = link.receive(_WORD_S)
        if isinstance(answer, Refused):
            raise LinkError(f"rank {rank} refuses rank {membership.rank}: {answer.reason}")
        if answer != JoinWorld(membership.world, membership.epoch, rank):
            raise LinkError(f"{link.peer!r} does not answer as rank {rank}")
    except BaseException:
        link.close()
        raise
    return link


def hear(link: Link) -> Arrival | None:
    """Who has dialled; None if it was refused or has nothing to say."""
    try:
        word, _ = link.receive(_WORD_S)
        if isinstance(word, JoinWorld):
            return Arrival(link, word)
        link.send(Refused("here ranks of a world meet"))
    except (LinkError, TimeoutError):
        pass
    link.close()
    return None


def hearing(accept: Callable[[float], Link]) -> Callable[[float], Arrival]:
    """Accepts whoever dials a listener of this world alone."""

    def wait(timeout_s: float) -> Arrival:
        deadline = time.monotonic() + timeout_s
        while True:
            arrival = hear(accept(max(0.0, deadline - time.monotonic())))
            if arrival is not None:
                return arrival

    return wait


def _answer(membership: Membership, arrival: Arrival) -> int:
    """The rank that has dialled; -1 if it was refused, which is no reason to give up."""
    link, reason = arrival.link, membership.judge(arrival.link, arrival.word)
    try:
        if reason is None:
            link.send(membership.word)
            return arrival.word.rank
        link.send(Refused(reason))
    except LinkError:
        pass
    link.close()
    return -1
