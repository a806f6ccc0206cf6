"""Members get their next certificate by the present one, in time and while welcome; so does the coordinator."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.core.errors import AuthError, ForbiddenError, UsageError
from shardcompute.node.enrolment.certificate_issuer import CertificateIssuer
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security import Credentials, NodeIdentity, Revocations, Role
from shardcompute.security.certificates import PeerIdentity, parse_certificate, peer_from_certificate
from shardcompute.wire import default_transports
from support.network.papers import Papers

DAY_S = 86_400.0


class Office:
    """An issuer, the clock that it goes by, and whom it refuses."""

    def __init__(self, folder: Path) -> None:
        self.papers = Papers.found(folder)
        self.now_s = time.time()
        self.revoked = Revocations()
        self.issuer = CertificateIssuer(
            self.papers.authority, folder / "coordinator", lambda: self.revoked, lambda: self.now_s
        )

    def join(self, name: str, role: Role = Role.WORKER) -> tuple[NodeIdentity, PeerIdentity]:
        identity = NodeIdentity.open(self.papers.folder / name)
        pem = self.issuer.admit(identity.certificate_request(), node_id=identity.node_id, role=role)
        return identity, self.read(pem)

    def read(self, pem: str) -> PeerIdentity:
        return peer_from_certificate(parse_certificate(pem))

    def pass_days(self, days: float) -> None:
        self.now_s += days * DAY_S


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


@pytest.mark.parametrize("role", [Role.WORKER, Role.DRIVER])
def test_a_member_gets_its_next_certificate_by_the_present_one(office: Office, role: Role) -> None:
    identity, peer = office.join("member", role)
    office.pass_days(60)
    renewed = office.read(office.issuer.renew(peer, identity.certificate_request()))
    assert renewed.expires_at_s == pytest.approx(peer.expires_at_s + 60 * DAY_S, abs=2)
    assert (renewed.node_id, renewed.roles, renewed.cluster) == (peer.node_id, peer.roles, peer.cluster)


def test_not_for_ever_new_ones(office: Office) -> None:
    identity, peer = office.join("member")
    office.pass_days(40)
    with pytest.raises(UsageError, match="good for long"):
        office.issuer.renew(peer, identity.certificate_request())


def test_not_by_one_that_has_run_out(office: Office) -> None:
    identity, peer = office.join("member")
    office.pass_days(91)
    with pytest.raises(AuthError, match="has run out"):
        office.issuer.renew(peer, identity.certificate_request())


def test_not_for_whoever_was_thrown_out(office: Office) -> None:
    identity, peer = office.join("member")
    office.pass_days(80)
    office.revoked = office.revoked.with_node(peer.node_id)
    with pytest.raises(ForbiddenError, match="removed"):
        office.issuer.renew(peer, identity.certificate_request())


def test_not_for_anothers_key_nor_another_cluster(office: Office, tmp_path: Path) -> None:
    _, peer = office.join("member")
    other, _ = office.join("other")
    office.pass_days(80)
    with pytest.raises(AuthError, match="its key belongs to"):
        office.issuer.renew(peer, other.certificate_request())
    stranger = Office(tmp_path / "elsewhere")
    _, foreign = stranger.join("stranger")
    foreign = PeerIdentity(foreign.node_id, foreign.roles, "garden", b"", "", foreign.expires_at_s)
    with pytest.raises(AuthError, match="belongs to the cluster"):
        office.issuer.renew(foreign, other.certificate_request())


@pytest.fixture
def endpoint(office: Office) -> Iterator[Endpoint]:
    endpoint = Endpoint(office.issuer.own(), "tcp://127.0.0.1:0", {}, transports=default_transports())
    yield endpoint
    endpoint.close()


def test_the_coordinators_own_is_renewed_in_time(office: Office, endpoint: Endpoint) -> None:
    join_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    before = endpoint.credentials.own
    office.issuer.check_own(endpoint, join_tls)
    assert endpoint.credentials.own == before
    office.pass_days(250)
    office.issuer.check_own(endpoint, join_tls)
    after = endpoint.credentials
    assert after.own.expires_at_s == pytest.approx(before.expires_at_s + 250 * DAY_S, abs=2)
    kept = Credentials.load(after.identity)
    assert kept is not None
    assert kept.own == after.own


def test_the_authoritys_end_is_said_half_a_year_before(
    office: Office, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    join_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with caplog.at_level(logging.WARNING):
        office.pass_days(3650 - 200)
        office.issuer.check_own(endpoint, join_tls)
        assert "runs out" not in caplog.text
        office.pass_days(30)
        office.issuer.check_own(endpoint, join_tls)
        assert "the authority of this cluster runs out in 170 days" in caplog.text
