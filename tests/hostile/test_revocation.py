"""A node that is thrown out: its links end, nobody talks to it any more, and the others go on without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.core.errors import AuthError, ForbiddenError, LinkError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.security import Role, parse_token
from support.network.papers import dial_as
from support.swarm.lab import Alone, LabSwarm, LabWorker, swarm

REQUEST = GenerationRequest(tuple(b"It was a dark and stormy night"), 300)


@pytest.fixture
def lab(tmp_path: Path, tiny: Path) -> Iterator[LabSwarm]:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        yield lab


def knows(worker: LabWorker, revoked: str) -> bool:
    return revoked in worker.revoked_nodes


def test_a_stage_is_thrown_out_in_the_middle_of_a_sentence(lab: LabSwarm, alone: Alone) -> None:
    talk = lab.start(REQUEST)
    lab.wait_until(lambda: len(talk.tokens) > 5, "some tokens")
    outcast = lab.stage(1)
    lab.workers.remove(outcast)
    try:
        lab.cluster.revoke_node(outcast.node)
        assert talk.result() == alone.answer(REQUEST)
        # It hears why, and does not knock again.
        lab.wait_until(lambda: "has been removed" in outcast.refusal, "its refusal")
        assert lab.state.nodes[outcast.node].status == "gone"
        assert outcast.node not in lab.chain().nodes
        # The others have heard of it without asking, and nobody has a link to it left.
        lab.wait_until(lambda: all(knows(worker, outcast.node) for worker in lab.workers), "the news")
        lab.wait_until(lambda: not lab.network.open_links(outcast.node), "the end of its links")
    finally:
        outcast.close()


def test_its_papers_open_nothing_any_more(lab: LabSwarm) -> None:
    outcast = lab.stage(0)
    credentials, folder = outcast.credentials, outcast.folder
    lab.workers.remove(outcast)
    outcast.close()
    lab.cluster.revoke_node(outcast.node)
    lab.wait_until(lambda: all(knows(worker, outcast.node) for worker in lab.workers), "the news")
    doors = [
        (lab.cluster.url, ("control", "stage", "weights", "probe")),
        *((worker.url, ("stage", "driver", "weights", "probe")) for worker in lab.workers),
    ]
    for url, roles in doors:
        for role in roles:
            with pytest.raises(LinkError, match="has been removed"):
                dial_as(credentials, url, role)
    invited = parse_token(lab.cluster.access.create_token())
    with pytest.raises(ForbiddenError, match="has been removed"):
        join_cluster(invited, folder, Role.WORKER)
    # As a new node the machine may come back, if it is invited again.
    (folder / "node.key").unlink()
    (folder / "certificate.pem").unlink()
    assert join_cluster(invited, folder, Role.WORKER)[0].identity.node_id != outcast.node


def test_it_cannot_come_back_under_another_name_with_the_token_that_it_used(
    lab: LabSwarm, tmp_path: Path
) -> None:
    outcast, others = lab.stage(0), parse_token(lab.cluster.access.create_token())
    used = lab.token.token_id
    lab.workers.remove(outcast)
    outcast.close()
    assert lab.cluster.access.tokens_used_by(outcast.node) == (used,)
    lab.cluster.revoke_node(outcast.node)
    states = {summary.token_id: summary.state for summary in lab.cluster.access.tokens()}
    assert (states[used], states[others.token_id]) == ("revoked", "valid")
    with pytest.raises(AuthError, match="is revoked"):
        join_cluster(lab.token, tmp_path / "reborn", Role.WORKER)
    assert join_cluster(others, tmp_path / "another", Role.WORKER)
    # Those who joined with the same token stay.
    lab.wait_serving(stages=3)
    lab.kill_cluster()
    lab.open_cluster()
    states = {summary.token_id: summary.state for summary in lab.cluster.access.tokens()}
    assert states[used] == "revoked", "a restart does not bring it back"


def test_nobody_is_forgotten_by_a_restart(lab: LabSwarm) -> None:
    outcast = lab.stage(2)
    credentials = outcast.credentials
    lab.workers.remove(outcast)
    outcast.close()
    lab.cluster.revoke_node(outcast.node)
    lab.kill_cluster()
    lab.open_cluster()
    with pytest.raises(LinkError, match="has been removed"):
        dial_as(credentials, lab.cluster.url, "control")
    latest = lab.add_worker(2)
    lab.wait_until(lambda: knows(latest, outcast.node), "the news at registration")
