"""Worlds over every fabric, with ranks as threads of the test."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardcompute.collectives import AUTO, FabricGroup, TopologyChoice
from shardcompute.collectives.worlds import ROLE, Membership, connect_world, hearing
from shardcompute.security import Credentials
from shardcompute.wire import InprocTransport, Link, LinkOptions, Listener, TcpTransport, Transport
from shardcompute.wire.local_sockets import LocalSockets
from support.network.papers import Papers, hello_of

FABRICS = ("inproc", "tcp", "tls", "local")
Connect = Callable[..., list[FabricGroup]]


@pytest.fixture(scope="session")
def papers(tmp_path_factory: pytest.TempPathFactory) -> list[Credentials]:
    """Those of nine nodes of one cluster."""
    issuer = Papers.found(tmp_path_factory.mktemp("papers"))
    return [issuer.node(f"n{index}") for index in range(9)]


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name


class Meeting:
    """Nodes that listen for each other, on one fabric."""

    def __init__(self, kind: str, papers: Sequence[Credentials], folder: Path) -> None:
        self.papers = papers
        self.is_secure = kind in ("tls", "local")
        self.transport: Transport = (
            InprocTransport()
            if kind == "inproc"
            else TcpTransport(LocalSockets(folder) if kind == "local" else None)
        )
        scheme = (lambda index: f"inproc://n{index}") if kind == "inproc" else (lambda _: "tcp://127.0.0.1:0")
        self.listeners: list[Listener] = [
            self.transport.listen(
                scheme(index),
                hello_of(each, ""),
                LinkOptions(tls=each.server_context()) if self.is_secure else LinkOptions(),
            )
            for index, each in enumerate(papers)
        ]

    def node(self, index: int) -> str:
        return self.papers[index].identity.node_id

    def dial(self, index: int, other: int) -> Link:
        """From one node to another."""
        options = LinkOptions(node=self.node(other), handshake_timeout_s=20)
        if self.is_secure:
            options = LinkOptions(
                tls=self.papers[index].client_context(), node=self.node(other), handshake_timeout_s=20
            )
        return self.transport.dial(self.listeners[other].address, hello_of(self.papers[index], ROLE), options)

    def join(
        self,
        rank: int,
        nodes: Sequence[int],
        epoch: int = 1,
        topology: TopologyChoice = AUTO,
        timeout_s: float = 20,
    ) -> FabricGroup:
        """One rank's part in forming the world of these nodes."""
        return connect_world(
            Membership("w", epoch, rank, [self.node(each) for each in nodes]),
            lambda other: self.dial(nodes[rank], nodes[other]),
            hearing(self.listeners[nodes[rank]].accept),
            topology=topology,
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


@pytest.fixture(params=FABRICS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def meeting(kind: str, papers: list[Credentials]) -> Iterator[Meeting]:
    # A test's own folder may have too long a name for a socket.
    with tempfile.TemporaryDirectory(prefix="sc-") as short:
        made = Meeting(kind, papers, Path(short, "links"))
        yield made
        made.close()


@pytest.fixture
def connect(meeting: Meeting) -> Iterator[Connect]:
    """Forms worlds: `connect(nodes, epoch=…, topology=…)` gives the groups by rank."""
    with ExitStack() as opened:

        def form(
            nodes: int | Sequence[int], *, epoch: int = 1, topology: TopologyChoice = AUTO
        ) -> list[FabricGroup]:
            chosen = list(range(nodes)) if isinstance(nodes, int) else list(nodes)
            with ThreadPoolExecutor(len(chosen)) as pool:
                joined = [
                    pool.submit(meeting.join, rank, chosen, epoch, topology) for rank in range(len(chosen))
                ]
                groups = [each.result(30) for each in joined]
            for group in groups:
                opened.callback(group.close)
            return groups

        yield form
