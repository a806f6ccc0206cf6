"""Copies of a stage that learns: how they meet, and the group in which they add up gradients and share the optimiser.

They meet once the driver has opened all of them; each dials those before it, over links of the role of runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardcompute.core.errors import CollectiveError
from shardcompute.finetune.swarm.frames import NoFacts, PeerAddress, make_frame
from shardcompute.node.rpc.commands import Peer
from shardcompute.wire import Link, Refused

if TYPE_CHECKING:
    from shardcompute.collectives.fabric_group import FabricGroup
    from shardcompute.collectives.group import Array
    from shardcompute.collectives.worlds import Arrival

_MEET_S = 60.0
_STEP_S = 300.0
"""So long a copy waits for another that has more to compute in a step."""


class CopyMeeting:
    """A `finetune.adamw.CopyGroup` whose copies are met after it was made. LinkError while there are none."""

    def __init__(self, run: str, place: int, copy: int, peers: Sequence[PeerAddress]) -> None:
        self.rank = copy
        self.size = max(1, len(peers))
        self._run, self._world = run, f"{run}/{place}"
        self._peers = list(peers)
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._over = threading.Event()
        self._links: list[Link] = []
        self._group: FabricGroup | None = None

    def serve(self, link: Link) -> None:
        """A copy has dialled: it is kept until the run is over. Whoever is none is refused."""
        from shardcompute.collectives.worlds import hear

        if link.peer not in [peer.node for peer in self._peers]:
            link.send(Refused("no such copy is expected here"))
            return
        arrival = hear(link)
        if arrival is not None:
            self._arrivals.put(arrival)
            self._over.wait()

    def meet(self, dial: Callable[[Peer], Link]) -> None:
        """Connect with all copies; nothing where there is only this one. CollectiveError where one does not come."""
        if self.size == 1:
            return
        from shardcompute.collectives.deadlines import CallDeadlines
        from shardcompute.collectives.worlds import Membership, connect_world

        def dial_rank(rank: int) -> Link:
            link = dial(Peer(self._peers[rank].node, self._peers[rank].url))
            self._links.append(link)
            link.send(*make_frame(self._run, "meet", NoFacts()))
            return link

        membership = Membership(self._world, 1, self.rank, [peer.node for peer in self._peers])
        self._group = connect_world(membership, dial_rank, self._accept, timeout_s=_MEET_S)
        self._group.world.deadlines = CallDeadlines(least_s=_STEP_S, untried_s=_STEP_S, most_s=_STEP_S)

    def reduce_scatter(self, array: Array, counts: Sequence[int] | None = None) -> Array:
        return self._met().reduce_scatter(array, counts)

    def all_reduce(self, array: Array) -> Array:
        return self._met().all_reduce(array)

    def all_gather(self, array: Array) -> list[Array]:
        return self._met().all_gather(array)

    def close(self) -> None:
        self._over.set()
        if self._group is not None:
            self._group.close()
        for link in self._links:
            link.close()

    def _met(self) -> FabricGroup:
        if self._group is None:
            raise CollectiveError("the copies of this stage have not met", hint="connect the stages first")
        return self._group

    def _accept(self, timeout_s: float) -> Arrival:
        try:
            return self._arrivals.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError("no copy dialled") from None
