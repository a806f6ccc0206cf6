"""What must not leak and must not get lost: secrets in logs, files that others can read, damaged records."""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from shardcompute.api import create_app
from shardcompute.control.events import NodeDrained, encode_event
from shardcompute.core.errors import AuthError, LinkError, SourceError, UsageError
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.enrolment.stored import join_from
from shardcompute.node.process.launch import first_key
from shardcompute.node.process.pidfile import CLUSTER_FILE, claim
from shardcompute.security import KeyRole, parse_token
from shardcompute.security.local_secret import local_secret
from support.network.papers import connect, dial_as
from support.swarm.lab import LabSwarm, swarm


@pytest.fixture
def lab(tmp_path: Path, tiny: Path) -> Iterator[LabSwarm]:
    with swarm(tmp_path, tiny, layers=(6,), stages=1) as lab:
        yield lab


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ask(lab: LabSwarm, path: str, key: str) -> httpx.Response:
    app = create_app(lab.cluster.pool, verify_key=lab.cluster.access.find_key)

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers={"authorization": f"Bearer {key}"})

    return asyncio.run(call())


def spellings(secret: bytes) -> list[str]:
    return [
        secret.hex(),
        repr(secret)[2:-1],
        base64.b64encode(secret).decode().rstrip("="),
        base64.urlsafe_b64encode(secret).decode().rstrip("="),
        str(list(secret))[1:-1],
    ]


def test_no_secret_is_logged(lab: LabSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """Everything is logged, nothing is filtered: joins and keys, good and bad, links, and a model served."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "shardcompute")
    lab.add_worker(0)
    text = lab.cluster.access.create_token(max_uses=1)
    token = parse_token(text)
    member = join_from(lab.folder / "joined", token)
    with pytest.raises(AuthError):
        join_from(lab.folder / "late", token)
    wrong = replace(token, secret=b"\x01" * 20)
    with pytest.raises(AuthError):
        join_from(lab.folder / "wrong", wrong)
    key = lab.cluster.access.create_key("mine")
    assert ask(lab, "/v1/models", key).status_code == 200
    assert ask(lab, "/v1/models", key + "x").status_code == 401
    with dial_as(member.credentials, lab.cluster.url, "probe"), connect(lab.cluster.url) as sock:
        sock.sendall(text.encode() + key.encode())
    private = [path.read_text().splitlines()[1] for path in lab.folder.rglob("node.key")]
    private += [path.read_text().splitlines()[1] for path in lab.folder.rglob("authority.pem")]
    assert len(private) >= 4
    secrets = [text, key, *spellings(token.secret), *spellings(wrong.secret), *private]
    logged = "\n".join(
        f"{record.getMessage()} {record.args!r} {record.exc_text or ''}" for record in caplog.records
    )
    assert "joined as worker" in logged
    assert [secret for secret in secrets if secret in logged] == []


def test_keys_and_certificates_are_for_their_owner_alone(lab: LabSwarm, stack: ExitStack) -> None:
    stack.enter_context(local_secret(lab.folder / "cluster"))
    join_from(lab.folder / "joined", parse_token(lab.cluster.access.create_token()))
    names = ("*.key", "*.pem", "*.secret", "member.json")
    found = {path for name in names for path in lab.folder.rglob(name)}
    assert {path.name for path in found} == {
        "node.key",
        "certificate.pem",
        "authority.pem",
        "operator.secret",
        "member.json",
    }
    modes = {path: oct(stat.S_IMODE(path.stat().st_mode)) for path in found}
    assert set(modes.values()) == {"0o600"}, modes
    assert stat.S_IMODE((lab.folder / "cluster").stat().st_mode) == 0o700


def test_no_key_lies_on_the_disk(lab: LabSwarm, stack: ExitStack) -> None:
    """Whoever steals the folder has hashes; the local secret is worth nothing once the cluster has stopped."""
    key = first_key(lab.cluster)
    assert key is not None
    assert first_key(lab.cluster) is None, "it is shown once"
    held = stack.enter_context(claim(lab.folder / "cluster" / CLUSTER_FILE))
    held.update(api_url="http://127.0.0.1:8000")
    made = [
        key,
        lab.cluster.access.create_key("more", role=KeyRole.OPERATE),
        lab.cluster.access.create_token(),
    ]
    for path in (path for path in lab.folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in made), path


# Damaged records


@pytest.fixture
def options(tmp_path: Path) -> ClusterOptions:
    """A cluster that ran once and is stopped."""
    options = ClusterOptions(tmp_path / "cluster", port=0, join_port=0)
    with Cluster(options) as cluster:
        cluster.access.create_token()
        cluster.access.create_key("mine")
        cluster.revoke_node("n" + "a" * 20)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return replace(options, port=free.getsockname()[1])


def change(options: ClusterOptions, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(options.folder / "journal.sqlite")) as connection, connection:
        assert connection.execute(statement, values).rowcount > 0


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x90", b"\x92\x01\xc0", b"\xff" * 1000])
@pytest.mark.parametrize("name", ["tokens", "keys", "revocations"])
def test_damaged_books_are_not_taken_for_empty_ones(
    options: ClusterOptions, name: str, content: bytes
) -> None:
    """An empty list of revocations would let somebody in."""
    change(options, "update notes set value = ? where name = ?", content, name)
    with pytest.raises(SourceError, match="damaged"):
        Cluster(options)
    # Nothing of the failed start is left: the port is free, the journal not locked.
    with socket.create_server(("127.0.0.1", options.port)):
        pass
    change(options, "delete from notes where name = ?", name)
    with Cluster(options) as cluster:
        assert cluster.url.endswith(f":{options.port}")


def test_damaged_events_are_skipped(options: ClusterOptions, caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        b"",
        b"\xff",
        b'{"type":"King"}',
        b'{"type":' + b"[" * 100_000,
        b'{"type":"NodeDrained","node":"\xff"}',
    ]
    for content in [*bad, encode_event(NodeDrained("n"))]:
        change(options, "insert into events (event) values (?)", content)
    with Cluster(options) as cluster:
        assert cluster.coordinator.state.nodes == {}
    lines = [record for record in caplog.records if "of the journal cannot be read" in record.getMessage()]
    assert len(lines) == 1, "one line, however many there are"


def test_a_port_that_is_taken_leaves_nothing_behind(options: ClusterOptions) -> None:
    with socket.create_server(("127.0.0.1", options.port)), pytest.raises(LinkError):
        Cluster(options)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises((LinkError, UsageError)):
            Cluster(replace(options, join_port=port))
        with socket.create_server(("127.0.0.1", options.port)):
            pass
    with Cluster(options):
        pass
