"""A coordinator whose disk is full: it acts first, says what is not on record, and puts it there when it can."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from shardcompute.api import create_app
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.control import ClusterState
from shardcompute.control.events import NodeDrained, encode_event
from shardcompute.core.errors import AuthError, DiskFullError, LinkError
from shardcompute.core.generation import GenerationRequest
from shardcompute.core.settings import load_settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.cluster import Cluster
from shardcompute.node.cluster import access as access_room
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.security import Role, parse_token
from support.network.papers import dial_as
from support.swarm.lab import Alone, LabSwarm, swarm

REQUEST = GenerationRequest(tuple(b"It was a dark and stormy night"), 120)


@pytest.fixture
def lab(tmp_path: Path, tiny: Path) -> Iterator[LabSwarm]:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        yield lab


@contextlib.contextmanager
def full_disk(cluster: Cluster) -> Iterator[None]:
    """Inside the block SQLite gets no further page, and no file can be written beside the authority."""

    def refuse(*_: object) -> None:
        raise DiskFullError("no space left on device")

    journal = cluster._journal
    filler = encode_event(NodeDrained("n" * 300))
    with journal._lock:
        [[pages]] = journal._connection.execute("pragma page_count").fetchall()
        journal._connection.execute(f"pragma max_page_count = {pages}")
    with contextlib.suppress(DiskFullError):
        while True:
            journal.append(filler)
    with mock.patch.object(access_room, "save_revocations", refuse):
        yield
    with journal._lock, contextlib.suppress(sqlite3.ProgrammingError):  # it may be closed
        journal._connection.execute("pragma max_page_count = 1000000")


def remembered(state: ClusterState) -> object:
    """What a restart must know: who is there, what is served and by whom."""
    nodes = {id: (node.status, node.shards) for id, node in state.nodes.items() if not node.is_live}
    chains = {id: (chain.model, chain.epoch, chain.stages) for id, chain in state.chains.items()}
    return nodes, chains, state.models


def test_a_worker_dies_in_the_middle_of_a_sentence(lab: LabSwarm, alone: Alone) -> None:
    with full_disk(lab.cluster):
        talk = lab.start(REQUEST)
        lab.wait_until(lambda: len(talk.tokens) > 5, "some tokens")
        dead = lab.stage(1)
        lab.kill(dead)
        assert talk.result() == alone.answer(REQUEST)
        assert not lab.state.nodes[dead.node].is_live
        assert dead.node not in lab.chain().nodes
        status = lab.cluster.record_status
        assert status.waiting > 0
        assert status.reason == "the coordinator's disk is full"
    lab.wait_until(lambda: not lab.cluster.record_status.waiting, "the record")
    lab.wait_quiet()
    before = remembered(lab.state)
    lab.kill_cluster()
    lab.open_cluster()
    assert remembered(lab.state)[0] == before[0]  # type: ignore[index]
    assert remembered(lab.state)[2] == before[2]  # type: ignore[index]


def test_it_dies_with_the_disk_still_full(lab: LabSwarm, alone: Alone) -> None:
    """What was not on record is forgotten, and what was is not; the cluster finds together again."""
    with full_disk(lab.cluster):
        lab.kill(lab.stage(1))
        lab.wait_serving(stages=3)
        lab.kill_cluster()
    lab.open_cluster()
    lab.serve()
    lab.wait_serving(stages=3)
    assert lab.ask(REQUEST) == alone.answer(REQUEST)


def test_a_machine_is_thrown_out_at_once(lab: LabSwarm) -> None:
    outcast = lab.stage(1)
    credentials = outcast.credentials
    lab.workers.remove(outcast)
    with full_disk(lab.cluster):
        assert not lab.cluster.revoke_node(outcast.node), "it is not on record"
        assert lab.state.nodes[outcast.node].status == "gone"
        outcast.close()
        with pytest.raises(LinkError, match="has been removed"):
            dial_as(credentials, lab.cluster.url, "control")
        with pytest.raises(AuthError, match=r"has been removed|token is revoked"):
            join_cluster(lab.token, outcast.folder, Role.WORKER)
        lab.wait_serving(stages=3)
    lab.wait_until(lambda: not lab.cluster.record_status.waiting, "the record")
    lab.kill_cluster()
    lab.open_cluster()
    with pytest.raises(LinkError, match="has been removed"):
        dial_as(credentials, lab.cluster.url, "control")


def test_keys_and_tokens_are_revoked_at_once(lab: LabSwarm, tmp_path: Path) -> None:
    key = lab.cluster.access.create_key("lost")
    token = parse_token(lab.cluster.access.create_token())
    with full_disk(lab.cluster):
        lab.cluster.access.revoke_key(lab.cluster.access.keys()[-1].key_id)
        lab.cluster.access.revoke_token(token.token_id)
        with pytest.raises(AuthError):
            lab.cluster.access.find_key(key)
        with pytest.raises(AuthError):
            join_cluster(token, tmp_path / "late", Role.WORKER)
    lab.wait_until(lambda: not lab.cluster.record_status.waiting, "the record")
    lab.kill_cluster()
    lab.open_cluster()
    with pytest.raises(AuthError):
        lab.cluster.access.find_key(key)
    with pytest.raises(AuthError):
        join_cluster(token, tmp_path / "late", Role.WORKER)


def health(admin: ClusterAdmin, cluster: Cluster) -> dict[str, Any]:
    """What an application with this cluster answers to everybody."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(cluster.pool, admin=admin))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/health")

    body: dict[str, Any] = asyncio.run(ask()).json()
    return body


def metrics(admin: ClusterAdmin, cluster: Cluster) -> str:
    return GenerationMetrics().snapshot(cluster.pool, admin.health()).render().decode()


def test_everybody_is_told(lab: LabSwarm, tmp_path: Path) -> None:
    settings = load_settings({"HOME": str(tmp_path)})
    with ClusterAdmin(lab.cluster, settings) as admin:
        assert health(admin, lab.cluster) == {"status": "ok"}
        with full_disk(lab.cluster):
            lab.cluster.revoke_node("n" * 20)
            told = health(admin, lab.cluster)
            assert told["status"] == "ok", "requests are answered"
            [warning] = told["warnings"]
            assert "not on record (the coordinator's disk is full)" in warning
            assert str(lab.folder) not in warning
            assert "not on record" in admin.state().warnings[0]
            assert "shardcompute_journal_unrecorded 0.0" not in metrics(admin, lab.cluster)
        lab.wait_until(lambda: not lab.cluster.record_status.waiting, "the record")
        assert "shardcompute_journal_unrecorded 0.0" in metrics(admin, lab.cluster)


SCRIPT = """
    import resource, sys, time
    from pathlib import Path
    from shardcompute.control.events import NodeDrained, NodeJoined
    from shardcompute.node.cluster import Cluster, ClusterOptions

    folder = Path(sys.argv[1])
    with Cluster(ClusterOptions(folder, port=0, join_port=0)) as cluster:
        for limit in (4096, resource.RLIM_INFINITY):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            node = f"n{limit}"
            is_recorded = cluster.revoke_node(node)
            cluster.coordinator.post(NodeJoined(
                node="m", name="m", role="worker", address="tcp://m:1", device="cpu", memory_bytes=1,
                threads=1, version="1", incarnation=1 + (limit < 0), now_s=0.0))
            deadline = time.monotonic() + 20
            while "m" not in cluster.coordinator.state.nodes and time.monotonic() < deadline:
                time.sleep(0.01)
            print(is_recorded, "m" in cluster.coordinator.state.nodes)
        while cluster.record_status.waiting and time.monotonic() < deadline:
            time.sleep(0.05)
        print(cluster.record_status.waiting)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_disk_that_the_system_itself_refuses(tmp_path: Path) -> None:
    """Not a fake: the kernel takes no more bytes, in SQLite's files as in ours."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "cluster")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.splitlines() == ["False True", "True True", "0"]
