"""Certificates are renewed while a node runs, and links end with those that opened them. The clocks are the test's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.node.rpc.renewal import CertificateRenewal
from shardcompute.security import Credentials, Role, read_peer
from shardcompute.wire import Link, Ping, Pong, default_transports
from shardcompute.wire.control import CertificateIssued
from support.network.papers import Papers

DAY_S = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.found(tmp_path_factory.mktemp("papers"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def answer(link: Link) -> None:
    while True:
        message, _ = link.receive()
        assert isinstance(message, Ping)
        link.send(Pong(message.nonce, 0.0))


def listening(credentials: Credentials, clock: Clock) -> Endpoint:
    endpoint = Endpoint(
        credentials, "tcp://127.0.0.1:0", {"probe": answer}, transports=default_transports(), clock=clock
    )
    endpoint.start()
    return endpoint


@pytest.fixture
def ours(papers: Papers, clock: Clock) -> Iterator[Endpoint]:
    endpoint = listening(papers.node("ours", Role.WORKER), clock)
    yield endpoint
    endpoint.close()


@pytest.fixture
def theirs(papers: Papers) -> Iterator[Endpoint]:
    endpoint = listening(papers.node("theirs", Role.WORKER), Clock())
    yield endpoint
    endpoint.close()


def is_answered(link: Link) -> bool:
    try:
        link.send(Ping(7, 0.0))
        return link.receive(20)[0] == Pong(7, 0.0)
    except LinkError:
        return False


def issue(papers: Papers, credentials: Credentials, days: float = 200, *roles: Role) -> CertificateIssued:
    return CertificateIssued(
        papers.authority.issue(
            credentials.identity.certificate_request(),
            node_id=credentials.identity.node_id,
            roles=roles or [Role.WORKER],
            now_s=time.time(),
            days=days,
        )
    )


def serial_shown_by(endpoint: Endpoint, to: Endpoint) -> str:
    with to.dial(endpoint.url, "probe") as link:
        return read_peer(link.certificate).serial


def test_it_asks_after_two_thirds_of_its_life_and_not_at_every_heartbeat(
    ours: Endpoint, clock: Clock
) -> None:
    renewal = CertificateRenewal(ours, clock)
    clock.ahead_s = 59 * DAY_S
    assert renewal.next_request() is None
    clock.ahead_s = 61 * DAY_S
    assert renewal.next_request() is not None
    assert renewal.next_request() is None
    asked = 0
    for _ in range(24 * 60):
        clock.ahead_s += 60.0
        asked += renewal.next_request() is not None
    assert 20 <= asked <= 40, "an unheard node asks about every hour"


def test_what_was_renewed_is_shown_on_every_new_link_and_kept(
    papers: Papers, ours: Endpoint, theirs: Endpoint, clock: Clock
) -> None:
    before = ours.credentials
    assert serial_shown_by(ours, theirs) == before.own.serial
    assert CertificateRenewal(ours, clock).take(issue(papers, before))
    renewed = ours.credentials
    assert renewed.own.serial != before.own.serial
    assert serial_shown_by(ours, theirs) == renewed.own.serial, "as the one that answers"
    seen: list[str] = []
    theirs._roles["probe"] = lambda link: seen.append(read_peer(link.certificate).serial)
    with ours.dial(theirs.url, "probe") as link, pytest.raises(LinkError):
        link.receive(20)
    assert seen == [renewed.own.serial], "as the one that dials"
    kept = Credentials.load(before.identity)
    assert kept is not None
    assert kept.own.serial == renewed.own.serial


def test_what_is_no_better_than_the_present_one_is_not_taken(
    papers: Papers, ours: Endpoint, clock: Clock, tmp_path: Path
) -> None:
    strangers = Papers.found(tmp_path)
    before = ours.credentials
    for issued in (
        CertificateIssued(error="This node has been removed from the cluster"),
        CertificateIssued("no certificate"),
        issue(strangers, before),
        issue(papers, before, 10),
        issue(papers, before, 200, Role.WORKER, Role.COORDINATOR),
        issue(papers, papers.node("another", Role.WORKER)),
    ):
        assert not CertificateRenewal(ours, clock).take(issued)
        assert ours.credentials == before


def test_links_end_with_the_certificates_that_opened_them(
    papers: Papers, ours: Endpoint, theirs: Endpoint, clock: Clock
) -> None:
    dialled, accepted = ours.dial(theirs.url, "probe"), theirs.dial(ours.url, "probe")
    clock.ahead_s = 89 * DAY_S
    ours.expire_links()
    assert is_answered(dialled)
    assert is_answered(accepted)
    CertificateRenewal(ours, clock).take(issue(papers, ours.credentials))
    renewed = issue(papers, theirs.credentials).certificate_pem
    theirs.renew(replace(theirs.credentials, certificate_pem=renewed))
    late = ours.dial(theirs.url, "probe")
    clock.ahead_s = 91 * DAY_S
    ours.expire_links()
    assert not is_answered(dialled)
    assert not is_answered(accepted)
    assert is_answered(late), "it was opened with the new ones"
    for link in (dialled, accepted, late):
        link.close()


def test_nobody_has_to_ask_for_that(papers: Papers, clock: Clock, theirs: Endpoint) -> None:
    identity = papers.node("short-lived", Role.WORKER).identity
    short = papers.authority.issue(
        identity.certificate_request(),
        node_id=identity.node_id,
        roles=[Role.WORKER],
        now_s=time.time(),
        days=2.5 / DAY_S,
    )
    endpoint = listening(Credentials(identity, short, papers.authority.certificate_pem), clock)
    try:
        with endpoint.dial(theirs.url, "probe") as dialled, theirs.dial(endpoint.url, "probe") as accepted:
            for link in (dialled, accepted):
                with pytest.raises(LinkError):
                    link.receive(20)
        with pytest.raises(LinkError):
            endpoint.dial(theirs.url, "probe").receive(20)
    finally:
        endpoint.close()
