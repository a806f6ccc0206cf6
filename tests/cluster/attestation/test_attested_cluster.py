"""A cluster that takes attested machines only, by made-up chips: who shows good evidence works, others do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.control.events import NodeJoined, encode_event
from shardcompute.core.errors import AuthError, UsageError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.cluster.attested import AttestedNodes
from shardcompute.node.enrolment.join_client import join_cluster, join_together
from shardcompute.security import Credentials, NodeIdentity, Role
from shardcompute.security.attestation.evidence import encode_evidence, report_data_of
from shardcompute.security.attestation.policy import AttestationPolicy, load_policy
from shardcompute.wire import Refused
from shardcompute.wire.control import Register
from support import attestation
from support.attestation import good_snp, good_tdx, write_policy
from support.models.tiny_checkpoint import save_tiny_llama
from support.network.papers import dial_as, hello_of
from support.swarm.lab import LabSwarm, swarm
from support.swarm.siege import receive


def request_of(folder: Path) -> str:
    return NodeIdentity.open(folder).certificate_request()


def snp_of(folder: Path) -> bytes:
    return encode_evidence(good_snp(report_data_of(request_of(folder))))


def tdx_of(folder: Path) -> bytes:
    return encode_evidence(good_tdx(report_data_of(request_of(folder))))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> AttestationPolicy:
    assert (
        attestation.NOW.timestamp() - 3650 * 86_400
        < time.time()
        < attestation.NOW.timestamp() + 3650 * 86_400
    )
    return load_policy(write_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def lab(policy: AttestationPolicy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabSwarm]:
    folder = tmp_path_factory.mktemp("swarm")
    base = save_tiny_llama(folder / "base", layers=2)
    with swarm(folder, base, layers=(2, 2), stages=1, attestation=policy, evidence_of=snp_of) as lab:
        yield lab


def test_attested_machines_work_and_it_is_told(lab: LabSwarm) -> None:
    assert {node.attested for node in lab.state.nodes.values()} == {
        f"sev-snp, measurement {attestation.MEASUREMENT.hex()[:16]}…"
    }
    answer = lab.start(GenerationRequest(prompt=(5, 6, 7), max_tokens=4)).result()
    assert len(answer.tokens) == 4


def test_quotes_are_as_good_as_reports(lab: LabSwarm, tmp_path: Path) -> None:
    credentials, _ = join_cluster(lab.token, tmp_path / "tdx", Role.WORKER, evidence=tdx_of(tmp_path / "tdx"))
    assert (lab.cluster.access.standing_of(credentials.identity.node_id) or "").startswith("tdx, ")


def test_who_shows_nothing_or_anothers_is_not_let_in(lab: LabSwarm, tmp_path: Path) -> None:
    refused = {
        b"": "whose hardware is attested",
        b"{}": "cannot be read",
        snp_of(tmp_path / "other"): "not about this node's key",
    }
    for evidence, reason in refused.items():
        with pytest.raises(AuthError, match=reason):
            join_cluster(lab.token, tmp_path / "worker", Role.WORKER, evidence=evidence)
    folders = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(UsageError, match="one worker"):
        join_together(lab.token, folders, Role.WORKER, evidence=snp_of(folders[0]))
    with pytest.raises(AuthError, match="several apply"):
        join_together(lab.token, folders, Role.WORKER)


def test_drivers_show_nothing(lab: LabSwarm, tmp_path: Path) -> None:
    credentials, _ = join_cluster(lab.token, tmp_path / "driver", Role.DRIVER)
    assert Role.DRIVER in credentials.own.roles


def described(member: Credentials) -> NodeJoined:
    return NodeJoined(
        node=member.identity.node_id,
        name="member",
        role="worker",
        address="tcp://127.0.0.1:1",
        device="cpu",
        memory_bytes=0,
        threads=1,
        version="1",
        incarnation=0,
        now_s=0.0,
        seconds_per_byte=1e-9,
        attested="sev-snp, measurement of its own word",
    )


def register(lab: LabSwarm, member: Credentials) -> str:
    """What the coordinator says to a member that calls itself attested; "": it is registered."""
    with dial_as(member, lab.cluster.url, "control", hello_of(member, "control")) as link:
        link.send(Register(encode_event(described(member))))
        node = member.identity.node_id
        if (lab.cluster.access.standing_of(node)) is None:
            return receive(link, Refused).reason
        lab.wait_until(lambda: node in lab.state.nodes, "a registered member")
        return ""


def test_members_of_another_policy_do_not_work(
    lab: LabSwarm, policy: AttestationPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a certificate from before, and says of itself that it is attested."""
    member, _ = join_cluster(
        lab.token, tmp_path / "member", Role.WORKER, evidence=snp_of(tmp_path / "member")
    )
    access = lab.cluster.access
    stricter = AttestedNodes(replace(policy, digest="another"), lab.cluster._notes)
    with monkeypatch.context() as patch:
        patch.setattr(access, "_attested", stricter)
        assert "only machines whose hardware is attested" in register(lab, member)
        assert member.identity.node_id not in lab.state.nodes
    assert register(lab, member) == ""
    assert "own word" not in lab.state.nodes[member.identity.node_id].attested


def test_standings_outlive_the_process(lab: LabSwarm, policy: AttestationPolicy) -> None:
    again = AttestedNodes(policy, lab.cluster._notes)
    for worker in lab.workers:
        assert again.standing_of(worker.node)
    assert again.standing_of("nobody") is None
    assert AttestedNodes(None, lab.cluster._notes).standing_of("nobody") == ""
