"""A worker that hosts drivers: for the coordinator alone, and of chains that it was told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.driver.hosted_server import DriverHost
from shardcompute.node.rpc.commands import FenceOff, Retire, Share
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security import Credentials, Role
from shardcompute.wire import default_transports
from shardcompute.wire.generations import RELEASED, CancelGeneration, Generate, GenerationFailed, pack_request
from support.network.papers import Papers, dial_as

PATIENCE_S = 10.0


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers.found(tmp_path)


@pytest.fixture
def coordinator(papers: Papers) -> Credentials:
    return papers.node("coordinator", Role.COORDINATOR)


@pytest.fixture
def host(papers: Papers) -> Iterator[DriverHost]:
    roles = {"generations": lambda link: host.serve(link)}
    endpoint = Endpoint(
        papers.node("host", Role.WORKER), "tcp://127.0.0.1:0", roles, transports=default_transports()
    )
    host = DriverHost(endpoint, lambda node: None, lambda overdue: None)
    with closing(endpoint), closing(host):
        endpoint.start()
        yield host


@pytest.fixture
def endpoint(host: DriverHost) -> Endpoint:
    return host.endpoint


def generate(number: int) -> Generate:
    return Generate(number, "m#1", pack_request(GenerationRequest((1, 2), 3)))


def test_the_coordinator_is_told_what_is_not_hosted(endpoint: Endpoint, coordinator: Credentials) -> None:
    with dial_as(coordinator, endpoint.url, "generations") as link:
        link.send(CancelGeneration(5))
        link.send(generate(6))
        answer, _ = link.receive(PATIENCE_S)
        assert isinstance(answer, GenerationFailed)
        assert (answer.number, answer.code) == (6, RELEASED)
        link.send(Generate(7, "m#1", b"\\x93"))
        answer, _ = link.receive(PATIENCE_S)
        assert isinstance(answer, GenerationFailed)


@pytest.mark.parametrize("role", [Role.WORKER, Role.DRIVER])
def test_nobody_else_is_served(endpoint: Endpoint, papers: Papers, role: Role) -> None:
    with (
        dial_as(papers.node("other", role), endpoint.url, "generations") as link,
        pytest.raises(LinkClosedError),
    ):
        link.receive(PATIENCE_S)


def test_what_cannot_be_read_ends_the_link(endpoint: Endpoint, coordinator: Credentials) -> None:
    with dial_as(coordinator, endpoint.url, "generations") as link:
        link.send(GenerationFailed(1, "", ""))
        with pytest.raises(LinkClosedError):
            link.receive(PATIENCE_S)


def test_a_host_that_closes_ends_its_links(
    host: DriverHost, endpoint: Endpoint, coordinator: Credentials
) -> None:
    with dial_as(coordinator, endpoint.url, "generations") as link:
        link.send(generate(1))
        link.receive(PATIENCE_S)
        host.close()
        with pytest.raises(LinkClosedError):
            link.receive(PATIENCE_S)


def test_orders_about_chains_that_are_not_here(host: DriverHost) -> None:
    assert host.session_namespace > 0
    host.carry_out(Retire("m#1"))
    host.carry_out(FenceOff("m#1", 1))
    with pytest.raises(LinkError):
        host.carry_out(Share("m#1", 1, 100))
    assert host.pool.chains() == set()
