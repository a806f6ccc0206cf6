"""Rank groups of a worker: for each epoch of a chain, the machines that compute one of its stages together.

Everybody is told by the coordinator who the ranks are, and dials those before it (role `collective`); only members of
the epoch that is being formed are heard. The first rank leads: its computing thread has the group (`stages`). The
others follow it on a thread of their own, here. A group that fails is reported as a broken link to the rank that it was
because of, and formed again with the chain's next epoch; groups of old epochs end with the fence, the next epoch, or
the shard.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardcompute.backends.executor import KvUsage
from shardcompute.core.errors import BackendError, CollectiveError, DeviceMemoryError, LinkError
from shardcompute.node.rpc.commands import Connect, Connected, Peer
from shardcompute.wire import Link, Refused

if TYPE_CHECKING:
    from shardcompute.collectives.fabric_group import FabricGroup
    from shardcompute.collectives.worlds import Arrival
    from shardcompute.control.state import ShardPlace
    from shardcompute.runtime.loaded_share import LateLeader, LoadedShare

log = logging.getLogger(__name__)
_FORM_S = 10.0
_HEARSAY_S = 3.0
"""Whoever saw a link break reports it; those who were told of it do so, too, if nothing has come of that by then."""
_BEAT_S = 15.0
"""So often a rank that leads, and has nothing to do, sees whether the others are there."""
_STEP_ENDS_S = 30.0


class _EpochOverError(Exception):
    """The meeting is for an epoch that is over."""


@dataclass(eq=False, slots=True)
class RankMeeting:
    """One forming of a stage's ranks, and the group that came of it."""

    place: ShardPlace
    epoch: int
    rank: int
    peers: list[Peer]
    group: FabricGroup | None = None
    arrivals: queue.SimpleQueue[Arrival | None] = field(default_factory=queue.SimpleQueue)
    links: list[Link] = field(default_factory=list)
    """Kept: a link that nobody holds is not ended with its certificate."""
    over: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    blamed: str = ""
    """The node because of which the group failed."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be computed by this group: its epoch is over, or it has failed."""
        return self.over.is_set() or bool(self.blamed)

    @property
    def chain(self) -> str:
        return self.place[0]

    @property
    def world(self) -> str:
        return f"{self.chain}/{self.place[1]}"

    @property
    def nodes(self) -> list[str]:
        return [peer.node for peer in self.peers]

    def accept(self, timeout_s: float) -> Arrival:
        try:
            arrival = self.arrivals.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError("nobody dialled") from None
        if arrival is None:
            raise _EpochOverError
        return arrival


class RankGroups:
    """Methods may be called from any thread."""

    def __init__(
        self,
        dial: Callable[[Peer], Link],
        on_link_broken: Callable[[str], None],
        *,
        on_out_of_memory: Callable[[ShardPlace, DeviceMemoryError], None] = lambda place, error: None,
        form_s: float = _FORM_S,
    ) -> None:
        self._dial = dial
        self._on_link_broken = on_link_broken
        self._on_out_of_memory = on_out_of_memory
        self._form_s = form_s
        self._lock = threading.Lock()
        self._leaders: dict[ShardPlace, LateLeader] = {}
        self._followers: dict[ShardPlace, LoadedShare] = {}
        self._meetings: dict[str, RankMeeting] = {}
        """The newest of each chain."""
        self._closing = threading.Event()
        self._beat: threading.Thread | None = None
        self.on_beat: Callable[[RankMeeting], None] = lambda meeting: None
        """Has a group that is led here say that it is there; set by whoever computes."""

    # Shares

    def add(self, place: ShardPlace, share: LoadedShare, leader: LateLeader | None) -> None:
        """Take a share in; with `leader`, which computes it where it leads."""
        with self._lock:
            if leader is not None:
                self._leaders[place] = leader
            else:
                self._followers[place] = share

    def leader(self, place: ShardPlace) -> LateLeader | None:
        with self._lock:
            return self._leaders.get(place)

    def follows(self, place: ShardPlace) -> bool:
        with self._lock:
            return place in self._followers

    def remove(self, place: ShardPlace) -> None:
        """End the group of a share and, where it follows, free it; one that leads is freed by its stage."""
        with self._lock:
            meeting = self._meetings.get(place[0])
            if meeting is not None and meeting.place == place:
                del self._meetings[place[0]]
            else:
                meeting = None
            self._leaders.pop(place, None)
            share = self._followers.pop(place, None)
        if meeting is not None:
            self._end(meeting)
        if share is not None:
            if meeting is not None and not _has_ended(meeting):
                # Its memory is freed with the process: nobody may free what a step is computing with.
                log.warning("a step of chain %s has not ended within %g s", place[0], _STEP_ENDS_S)
                return
            share.executor.close()

    def kv_usages(self) -> list[KvUsage]:
        """Of shares that follow."""
        with self._lock:
            shares = list(self._followers.values())
        return [share.executor.kv_usage() for share in shares]

    # Epochs

    def follow(self, command: Connect) -> Connected:
        """Take part in an epoch as a rank that does not lead. Raises LinkError."""
        with self._lock:
            share, former = self._followers.get(command.place), self._meetings.get(command.chain)
        if share is None:
            raise LinkError(
                f"layers {command.start} to {command.stop} of chain {command.chain} are not loaded here"
            )
        meeting = self.begin(command)
        if former is not None and not _has_ended(former):
            raise BackendError(
                f"this worker has been in one step for more than {_STEP_ENDS_S:.0f} s",
                hint="restart it; its log says with what",
            )
        if not command.keeps_sessions:
            share.forget_sessions()
        group = self.meet(meeting)
        share.group.bind(group)
        thread = threading.Thread(target=self._follow, args=(meeting, share, group), name="rank", daemon=True)
        meeting.thread = thread
        thread.start()
        return Connected(command.keeps_sessions)

    def begin(self, command: Connect) -> RankMeeting:
        """Expect the ranks of a new epoch; the chain's group before is over. LinkError where a newer one is."""
        assert command.tensor is not None
        meeting = RankMeeting(command.place, command.epoch, command.tensor.rank, command.ranks)
        with self._lock:
            former = self._meetings.get(command.chain)
            if self._closing.is_set() or (former is not None and former.epoch > command.epoch):
                raise LinkError(f"epoch {command.epoch} of chain {command.chain} is over")
            self._meetings[command.chain] = meeting
        if former is not None:
            self._end(former)
        return meeting

    def meet(self, meeting: RankMeeting) -> FabricGroup:
        """Connect with all ranks of a meeting. LinkError where one does not come, which is reported."""
        from shardcompute.collectives.worlds import Membership, connect_world

        def dial(rank: int) -> Link:
            if meeting.over.is_set():
                raise _EpochOverError
            link = self._dial(meeting.peers[rank])
            meeting.links.append(link)
            return link

        membership = Membership(meeting.world, meeting.epoch, meeting.rank, meeting.nodes)
        try:
            group = connect_world(membership, dial, meeting.accept, timeout_s=self._form_s)
        except _EpochOverError:
            self._end(meeting)
            raise LinkError(f"epoch {meeting.epoch} of chain {meeting.chain} is over") from None
        except CollectiveError as error:
            # Of what goes wrong when all have come, those tell whose links were not there.
            if error.operation == "form" and error.rank is not None and not meeting.over.is_set():
                self._on_link_broken(meeting.peers[error.rank].node)
            self._end(meeting)
            raise
        with self._lock:
            meeting.group = group
            is_over = meeting.over.is_set()
        if is_over:
            group.close()
            raise LinkError(f"epoch {meeting.epoch} of chain {meeting.chain} is over")
        if meeting.rank == 0:
            self._begin_beat()
        return group

    def failed(self, meeting: RankMeeting, error: CollectiveError) -> None:
        """A group has ended that nobody here has ended: the chain needs another epoch."""
        from shardcompute.collectives.fabrics.fabric import PeerAbortedError

        with self._lock:
            if meeting.over.is_set() or meeting.blamed:
                return
            rank = error.rank
            if rank is None or rank == meeting.rank or not 0 <= rank < len(meeting.peers):
                rank = 0 if meeting.rank else 1
            meeting.blamed = meeting.peers[rank].node
        log.warning("the ranks of %s have parted: %s", meeting.world, error.message)
        if not isinstance(error.__cause__, PeerAbortedError):
            self._on_link_broken(meeting.blamed)
            return

        def tell() -> None:
            if not meeting.over.is_set():
                self._on_link_broken(meeting.blamed)

        later = threading.Timer(_HEARSAY_S, tell)
        later.daemon = True
        later.start()

    def fence(self, chain: str, epoch: int) -> None:
        """Groups of this epoch and earlier ones are over."""
        with self._lock:
            meeting = self._meetings.get(chain)
        if meeting is not None and meeting.epoch <= epoch:
            self._end(meeting)

    def unreachable(self) -> set[str]:
        """The nodes because of which groups of current epochs have failed."""
        with self._lock:
            meetings = list(self._meetings.values())
        return {each.blamed for each in meetings if each.blamed and not each.over.is_set()}

    def serve(self, link: Link) -> None:
        """A rank has dialled: it is kept until its group is over. Whoever is not expected is refused."""
        from shardcompute.collectives.worlds import hear

        arrival = hear(link)
        if arrival is None:
            return
        word = arrival.word
        with self._lock:
            meetings = [each for each in self._meetings.values() if not each.over.is_set()]
        expected = [each for each in meetings if (each.world, each.epoch) == (word.world, word.epoch)]
        if not expected or link.peer not in expected[0].nodes or expected[0].group is not None:
            link.send(Refused("no such rank is expected here"))
            return
        expected[0].arrivals.put(arrival)
        expected[0].over.wait()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            meetings, self._meetings = list(self._meetings.values()), {}
            shares, self._followers = self._followers, {}
        for meeting in meetings:
            self._end(meeting)
        stuck = {each.place for each in meetings if not _has_ended(each)}
        for place, share in shares.items():
            if place not in stuck:
                share.executor.close()

    # Inside

    def _end(self, meeting: RankMeeting) -> None:
        with self._lock:
            meeting.over.set()
            group = meeting.group
        meeting.arrivals.put(None)
        if group is not None:
            group.close()
        for link in meeting.links:
            link.close()

    def _follow(self, meeting: RankMeeting, share: LoadedShare, group: FabricGroup) -> None:
        from shardcompute.backends.device_memory import device_memory_error, is_out_of_memory
        from shardcompute.runtime.tensor_stage import follow_leader

        try:
            follow_leader(share.executor, share.rank, group, share.stage)
        except CollectiveError as error:
            self.failed(meeting, error)
        except LinkError as error:
            self.failed(meeting, CollectiveError(error.message, rank=0))
        except Exception as error:
            if is_out_of_memory(error):
                self._on_out_of_memory(
                    meeting.place, device_memory_error(error, "a rank's step was computed")
                )
            else:
                log.exception("a rank of %s failed", meeting.world)
                self.failed(meeting, CollectiveError(str(error), rank=meeting.rank))

    def _begin_beat(self) -> None:
        with self._lock:
            if self._beat is None and not self._closing.is_set():
                self._beat = threading.Thread(target=self._keep_beating, name="rank beat", daemon=True)
                self._beat.start()

    def _keep_beating(self) -> None:
        while not self._closing.wait(_BEAT_S):
            with self._lock:
                led = [each for each in self._meetings.values() if each.rank == 0 and each.group is not None]
            for meeting in led:
                if not meeting.over.is_set():
                    self.on_beat(meeting)


def _has_ended(meeting: RankMeeting) -> bool:
    """Whether the thread that follows in a meeting that is over has come to its end."""
    if meeting.thread is not None and meeting.thread is not threading.current_thread():
        meeting.thread.join(_STEP_ENDS_S)
        return not meeting.thread.is_alive()
    return True
