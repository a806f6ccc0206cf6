"""Links between nodes of one machine: whoever may not talk over the network may not talk here either."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security import Credentials, Revocations, Role
from shardcompute.wire import Link, Ping, Pong, default_transports
from support.network.papers import Papers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no local sockets")


def _echo(link: Link) -> None:
    while True:
        message, _ = link.receive()
        assert isinstance(message, Ping)
        link.send(Pong(message.nonce, 0.0))


def _is_answered(link: Link) -> bool:
    link.send(Ping(7, 0.0))
    return link.receive(20)[0] == Pong(7, 0.0)


@dataclass
class _Machine:
    """Two nodes of a cluster, and the clock of both."""

    papers: Papers
    opened: ExitStack
    ahead_s: float = 0.0

    def open(self, credentials: Credentials) -> Endpoint:
        endpoint = Endpoint(
            credentials,
            "tcp://127.0.0.1:0",
            {"echo": _echo},
            transports=default_transports(),
            clock=lambda: time.time() + self.ahead_s,
        )
        self.opened.callback(endpoint.close)
        endpoint.start()
        return endpoint


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[_Machine]:
    with ExitStack() as opened:
        yield _Machine(Papers.found(tmp_path), opened)


@pytest.fixture
def worker(machine: _Machine) -> Endpoint:
    return machine.open(machine.papers.node("worker", Role.WORKER))


@pytest.fixture
def driver(machine: _Machine) -> Endpoint:
    return machine.open(machine.papers.node("driver", Role.COORDINATOR))


def test_nodes_of_one_machine_meet_there(worker: Endpoint, driver: Endpoint) -> None:
    with driver.dial(worker.url, "echo", worker.node, needs=Role.WORKER) as link:
        assert link.stats.is_local
        assert link.peer == worker.node
        assert _is_answered(link)
    with worker.dial(worker.url, "echo", worker.node) as link:
        assert link.stats.is_local
        assert _is_answered(link)
    # Who is wanted there is not said: the address alone does not lead to a socket.
    with driver.dial(worker.url, "echo") as link:
        assert link.stats.tls_version == "TLSv1.3"
        assert _is_answered(link)


def test_a_role_that_a_certificate_does_not_have(worker: Endpoint, driver: Endpoint) -> None:
    with pytest.raises(LinkError):
        driver.dial(worker.url, "echo", worker.node, needs=Role.COORDINATOR)
    with pytest.raises(LinkError, match="does not serve links of role"):
        driver.dial(worker.url, "control", worker.node)


def test_a_node_of_another_cluster(machine: _Machine, worker: Endpoint, tmp_path: Path) -> None:
    stranger = machine.open(Papers.found(tmp_path / "other").node("driver", Role.COORDINATOR))
    with pytest.raises(LinkError, match="TLS"):
        stranger.dial(worker.url, "echo", worker.node)


@pytest.mark.parametrize("who", ["dialler", "dialled"])
def test_revocation_ends_local_links_and_lets_none_begin(
    worker: Endpoint, driver: Endpoint, who: str
) -> None:
    with driver.dial(worker.url, "echo", worker.node) as link:
        assert _is_answered(link)
        if who == "dialler":
            worker.heed(Revocations().with_node(driver.node))
        else:
            driver.heed(Revocations().with_node(worker.node))
        with pytest.raises(LinkClosedError):
            link.receive(20)
    with pytest.raises(LinkError, match="has been removed"):
        driver.dial(worker.url, "echo", worker.node)


def test_a_local_link_ends_with_the_certificate_that_opened_it(
    machine: _Machine, worker: Endpoint, driver: Endpoint
) -> None:
    with driver.dial(worker.url, "echo", worker.node) as link:
        assert _is_answered(link)
        machine.ahead_s = 10 * 365 * 86_400.0
        worker.expire_links()
        with pytest.raises(LinkClosedError):
            link.receive(20)
