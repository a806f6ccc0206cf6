"""Certificates of a running swarm: renewed without a restart; links end with them, and nobody who asks notices."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from unittest import mock

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.node.enrolment import certificate_issuer
from shardcompute.security import Credentials, Role
from shardcompute.security.certificates import parse_certificate
from shardcompute.wire.control import CertificateIssued, RenewCertificate
from support.models.requests import mixture
from support.network.papers import dial_as
from support.swarm.lab import Alone, LabWorker, swarm

LIFE_S = 12.0
DAY_S = 86_400.0


def present(worker: LabWorker) -> Credentials:
    return worker._endpoint.credentials


def test_members_outlive_their_certificates(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with (
        mock.patch.object(certificate_issuer, "MEMBER_DAYS", LIFE_S / DAY_S),
        swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab,
    ):
        before, stages = {worker: present(worker).own for worker in lab.workers}, lab.chain().stages
        old_links = [link for link in lab.network._links if link.kind != "probe"]
        over_s = max(own.expires_at_s for own in before.values()) + 1.0
        requests = mixture(alone, 4, 40)
        while time.time() < over_s:
            for request in requests:
                assert lab.ask(request) == alone.answer(request)
        for worker, own in before.items():
            assert present(worker).own.expires_at_s > own.expires_at_s
            kept = Credentials.load(worker.credentials.identity)
            assert kept is not None
            assert kept.own.serial == present(worker).own.serial, "it is found again after a restart"
        lab.wait_until(
            lambda: not any(link in lab.network._links for link in old_links),
            lambda: f"links that outlive their certificates: {lab.network.open_links()}",
        )
        lab.wait_serving(stages=3)
        assert lab.chain().stages == stages, "nobody was lost"
        with pytest.raises(LinkError):
            dial_as(lab.workers[0].credentials, lab.cluster.url, "control").receive(20)


def test_whoever_was_thrown_out_gets_no_other(tmp_path: Path, tiny: Path) -> None:
    with swarm(tmp_path, tiny, layers=(6, 6), stages=1) as lab:
        worker = lab.add_worker(1)
        lab.wait_until(lambda: worker.node in lab.state.nodes, "it has joined")
        request = RenewCertificate(worker.credentials.identity.certificate_request())
        with dial_as(worker.credentials, lab.cluster.url, "control") as link:
            link.send(request)
            answer, _ = link.receive(20)
            assert isinstance(answer, CertificateIssued)
            assert "good for long" in answer.error
            lab.cluster.revoke_node(worker.node)
            with contextlib.suppress(LinkError):
                link.send(request)
            with pytest.raises(LinkError):
                link.receive(20)


def test_a_certificate_that_was_renewed_is_of_the_same_cluster_and_role(tmp_path: Path, tiny: Path) -> None:
    with swarm(tmp_path, tiny, layers=(6,), stages=1) as lab:
        [worker] = lab.workers
        own = worker.credentials.own
        with (
            mock.patch.object(certificate_issuer, "MEMBER_DAYS", 400.0),
            dial_as(worker.credentials, lab.cluster.url, "control") as link,
        ):
            link.send(RenewCertificate(worker.credentials.identity.certificate_request()))
            answer, _ = link.receive(20)
        assert isinstance(answer, CertificateIssued)
        renewed = Credentials(
            worker.credentials.identity, answer.certificate_pem, worker.credentials.authority_pem
        ).own
        assert (renewed.roles, renewed.cluster) == ({Role.WORKER}, own.cluster)
        assert renewed.expires_at_s > own.expires_at_s
        authority = parse_certificate(worker.credentials.authority_pem)
        parse_certificate(answer.certificate_pem).verify_directly_issued_by(authority)
