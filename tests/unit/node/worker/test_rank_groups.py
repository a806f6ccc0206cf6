"""Ranks meet for one epoch: nobody else is heard, whoever does not come is named, and what is over wakes who waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from shardcompute.collectives.fabric_group import FabricGroup
from shardcompute.control.state import RankPlace
from shardcompute.core.errors import CollectiveError, LinkClosedError, LinkError
from shardcompute.node.rpc.commands import Connect, Peer
from shardcompute.node.worker.ranks.groups import RankGroups
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, InprocTransport, JoinWorld, Link, Refused

DRIVER = Peer("driver", "inproc://driver")


class Workers:
    """Rank groups of a few nodes that can reach each other."""

    def __init__(self, count: int, on_exit: ExitStack, form_s: float = 20.0) -> None:
        self.transport = InprocTransport()
        self.peers = [Peer(f"n{index}", f"inproc://n{index}") for index in range(count)]
        self.broken: list[tuple[str, str]] = []
        self.groups = [self._open(peer, on_exit, form_s) for peer in self.peers]
        self._threads = on_exit.enter_context(ThreadPoolExecutor(count))
        for groups in self.groups:
            on_exit.callback(groups.close)

    def _open(self, peer: Peer, on_exit: ExitStack, form_s: float) -> RankGroups:
        listener = self.transport.listen(peer.url, self._hello(peer.node))
        groups = RankGroups(
            lambda other: self.dial(peer.node, other),
            lambda node: self.broken.append((peer.node, node)),
            form_s=form_s,
        )

        def accept() -> None:
            while True:
                try:
                    link = listener.accept()
                except LinkClosedError:
                    return
                threading.Thread(target=self._serve, args=(groups, link), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        on_exit.callback(listener.close)
        return groups

    def _serve(self, groups: RankGroups, link: Link) -> None:
        with link:
            groups.serve(link)

    def _hello(self, node: str) -> Hello:
        return Hello(VERSION_MIN, VERSION_MAX, node, "collective", "home")

    def dial(self, node: str, other: Peer) -> Link:
        return self.transport.dial(other.url, self._hello(node))

    def connect(self, rank: int, epoch: int = 1) -> Connect:
        return Connect(
            chain="m#1",
            epoch=epoch,
            start=0,
            stop=2,
            next=DRIVER,
            previous_node="driver",
            driver=DRIVER,
            session_namespace=0,
            kv_tokens=64,
            is_last=True,
            tensor=RankPlace(rank, (1,) * len(self.peers)),
            ranks=self.peers,
        )

    def meet(self, epoch: int = 1) -> list[FabricGroup]:
        def one(rank: int) -> FabricGroup:
            return self.groups[rank].meet(self.groups[rank].begin(self.connect(rank, epoch)))

        return list(self._threads.map(one, range(len(self.peers))))


@pytest.fixture
def on_exit() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def summed(workers: Workers, groups: list[FabricGroup]) -> list[float]:
    sums = workers._threads.map(lambda group: group.all_reduce(np.ones(3, np.float32)), groups)
    return [float(each[0]) for each in sums]


def test_each_epoch_has_a_group_of_its_own(on_exit: ExitStack) -> None:
    workers = Workers(3, on_exit)
    first = workers.meet()
    assert summed(workers, first) == [3.0, 3.0, 3.0]
    second = workers.meet(epoch=2)
    assert summed(workers, second) == [3.0, 3.0, 3.0]
    with pytest.raises(CollectiveError):
        first[0].barrier()
    with pytest.raises(LinkError, match="epoch 1 of chain m#1 is over"):
        workers.groups[0].begin(workers.connect(0, epoch=1))
    assert workers.broken == []


def test_a_fence_wakes_who_waits_and_reports_nothing(on_exit: ExitStack) -> None:
    workers = Workers(2, on_exit)
    leader, follower = workers.meet()
    waiting = workers._threads.submit(follower.broadcast, None, 0, 60.0)
    workers.groups[1].fence("m#1", 1)
    with pytest.raises(CollectiveError):
        waiting.result(timeout=20)
    assert workers.broken == []
    with pytest.raises(CollectiveError):
        leader.barrier()


@pytest.mark.parametrize(
    ("node", "word"),
    [
        ("n1", JoinWorld("m#1/0", 7, 1)),
        ("n1", JoinWorld("other/0", 1, 1)),
        ("stranger", JoinWorld("m#1/0", 1, 1)),
    ],
    ids=["another epoch", "another world", "no member"],
)
def test_whoever_is_not_expected_is_refused(on_exit: ExitStack, node: str, word: JoinWorld) -> None:
    workers = Workers(2, on_exit)
    workers.groups[0].begin(workers.connect(0))
    with workers.dial(node, workers.peers[0]) as link:
        link.send(word)
        answer, _ = link.receive(20.0)
    assert isinstance(answer, Refused)


def test_a_rank_that_does_not_come_is_reported(on_exit: ExitStack) -> None:
    workers = Workers(2, on_exit, form_s=0.2)
    meeting = workers.groups[0].begin(workers.connect(0))
    with pytest.raises(CollectiveError, match="rank 1 did not come"):
        workers.groups[0].meet(meeting)
    assert workers.broken == [("n0", "n1")]
