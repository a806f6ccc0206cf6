"""A journal that is lost, cut or damaged: nobody who was thrown out comes back, and nothing is forgotten in silence."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.control.events import NodeDrained, encode_event
from shardcompute.core.errors import AuthError, ForbiddenError, JournalError, LinkError, SourceError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.coordinator.journal import Journal
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.security import Role, parse_token
from support.network.papers import dial_as
from support.swarm.lab import Alone, LabSwarm, swarm

REQUEST = GenerationRequest(tuple(b"It was a dark and stormy night"), 30)
FILES = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm")


@pytest.fixture
def options(tmp_path: Path) -> ClusterOptions:
    """A cluster that ran once, threw a node out, and is stopped."""
    options = ClusterOptions(tmp_path / "cluster", port=0, join_port=0)
    with Cluster(options) as cluster:
        token = parse_token(cluster.access.create_token())
        cluster.access.create_key("mine")
        outcast, _ = join_cluster(token, tmp_path / "outcast", Role.WORKER)
        assert cluster.revoke_node(outcast.identity.node_id)
        for _ in range(200):
            cluster.coordinator.record.append(encode_event(NodeDrained("x" * 300)))
    return options


def lose_journal(options: ClusterOptions) -> None:
    for name in FILES:
        (options.folder / name).unlink(missing_ok=True)


def is_still_out(cluster: Cluster, folder: Path) -> bool:
    with pytest.raises(ForbiddenError, match="has been removed"):
        join_cluster(parse_token(cluster.access.create_token()), folder, Role.WORKER)
    return True


def refusal(options: ClusterOptions) -> JournalError | None:
    """Why the cluster does not start, if it does not; nothing else may be raised."""
    try:
        Cluster(options).close()
    except JournalError as error:
        return error
    return None


def test_a_lost_journal_is_said_and_readmits_nobody(options: ClusterOptions, tmp_path: Path) -> None:
    lose_journal(options)
    for _ in range(2):  # the first refusal leaves nothing behind that the second would take for a journal
        with pytest.raises(JournalError, match=r"lost its journal: journal\.sqlite is missing") as caught:
            Cluster(options)
        assert "--recover-journal" in caught.value.hint
        assert caught.value.exit_code == 6
    with Cluster(replace(options, recovers_journal=True)) as cluster:
        assert is_still_out(cluster, tmp_path / "outcast")
        assert cluster.access.keys() == ()
    # The decision was for once.
    with Cluster(options) as cluster:
        assert is_still_out(cluster, tmp_path / "outcast")


@pytest.mark.parametrize("content", [b"", b"\0" * 8192], ids=["emptied", "zeros"])
def test_an_emptied_journal_is_no_new_cluster(
    options: ClusterOptions, tmp_path: Path, content: bytes
) -> None:
    lose_journal(options)
    (options.folder / "journal.sqlite").write_bytes(content)
    with pytest.raises(JournalError, match="journal"):
        Cluster(options)
    with Cluster(replace(options, recovers_journal=True)) as cluster:
        assert is_still_out(cluster, tmp_path / "outcast")


def test_revocations_survive_a_journal_of_before(options: ClusterOptions, tmp_path: Path) -> None:
    """Somebody puts back a copy that is older than the revocation."""
    with closing(sqlite3.connect(options.folder / "journal.sqlite")) as connection, connection:
        assert connection.execute("delete from notes where name = 'revocations'").rowcount == 1
    with Cluster(options) as cluster:
        assert is_still_out(cluster, tmp_path / "outcast")


def test_revocations_survive_the_loss_of_their_own_file(options: ClusterOptions, tmp_path: Path) -> None:
    (options.folder / "authority" / "revocations").unlink()
    with Cluster(options) as cluster:
        assert is_still_out(cluster, tmp_path / "outcast")
    lose_journal(options)
    with Cluster(replace(options, recovers_journal=True)) as cluster:
        assert is_still_out(cluster, tmp_path / "outcast")


def test_a_damaged_list_is_not_taken_for_an_empty_one(options: ClusterOptions) -> None:
    (options.folder / "authority" / "revocations").write_bytes(b"\xc1")
    with pytest.raises(SourceError, match="authority/revocations: The list of revoked nodes is damaged"):
        Cluster(options)


def test_a_journal_without_its_authority_makes_no_new_cluster(options: ClusterOptions) -> None:
    shutil.rmtree(options.folder / "authority")
    with pytest.raises(SourceError, match="whose authority is missing") as caught:
        Cluster(options)
    assert "every machine has to join again" in caught.value.hint
    assert not (options.folder / "authority").exists()


def test_the_journal_of_another_cluster(options: ClusterOptions, tmp_path: Path) -> None:
    other = replace(options, folder=tmp_path / "other")
    with Cluster(other):
        pass
    lose_journal(options)
    shutil.copy(other.folder / "journal.sqlite", options.folder / "journal.sqlite")
    with pytest.raises(SourceError, match="of another cluster"):
        Cluster(options)


def test_journals_cut_anywhere_raise_nothing_raw(options: ClusterOptions, tmp_path: Path) -> None:
    """At every length and with any bytes in it a journal is either good, or refused in words; recovering always
    leads to a cluster, and the damaged file is kept."""
    whole = (options.folder / "journal.sqlite").read_bytes()
    dice = random.Random(4)
    damages = [whole[:length] for length in range(0, len(whole), 1 + len(whole) // 20)]
    for _ in range(20):
        content = bytearray(whole)
        at = dice.randrange(len(content))
        content[at : at + 600] = dice.randbytes(len(content[at : at + 600]))
        damages.append(bytes(content))
    refused = 0
    for content in damages:
        for kept in options.folder.glob("journal.*"):
            kept.unlink()
        (options.folder / "journal.sqlite").write_bytes(content)
        reason = refusal(options)
        if reason is None:
            continue
        refused += 1
        assert str(options.folder) in reason.message
        assert "--recover-journal" in reason.hint
        with Cluster(replace(options, recovers_journal=True)) as cluster:
            assert is_still_out(cluster, tmp_path / "outcast")
        for aside in options.folder.glob("journal.damaged-*.sqlite"):
            assert aside.read_bytes() == content
            assert aside.stat().st_mode & 0o777 == 0o600
        assert refusal(options) is None
    assert refused >= len(damages) // 2


def test_the_good_beginning_is_kept(options: ClusterOptions) -> None:
    path = options.folder / "journal.sqlite"
    with closing(Journal(path)) as journal:
        before = journal.numbered_events()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    with Cluster(replace(options, recovers_journal=True)):
        pass
    with closing(Journal(path)) as journal:
        after = [event for _, event in journal.numbered_events()]
    kept = [event for _, event in before][: len(after)]
    assert len(kept) > 20
    # What the new start added comes behind it.
    assert sum(a == b for a, b in zip(after, kept, strict=True)) > 20
    assert len(list(options.folder.glob("journal.damaged-*.sqlite"))) == 1
    assert not list(options.folder.glob(".recovery-*"))


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b"[" * 100_000, b'{"a":1}'])
def test_a_damaged_list_of_models(options: ClusterOptions, content: bytes) -> None:
    with closing(sqlite3.connect(options.folder / "journal.sqlite")) as connection, connection:
        connection.execute("insert or replace into notes values ('models', ?)", (content,))
    with pytest.raises(JournalError, match="The list of models is damaged"):
        Cluster(options)
    with Cluster(replace(options, recovers_journal=True)) as cluster:
        assert cluster.remembered() == ()
        assert len(cluster.access.keys()) == 1, "the rest is kept"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_nobody_else_can_read_it(options: ClusterOptions) -> None:
    path = options.folder / "journal.sqlite"
    path.chmod(0o644)
    with Cluster(options):
        files = [*options.folder.glob("journal.*"), *(options.folder / "authority").iterdir()]
        assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {
            file.name: "0o600" for file in files
        }
        assert len(files) >= 4


@pytest.fixture
def lab(tmp_path: Path, tiny: Path) -> Iterator[LabSwarm]:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        yield lab


def test_machines_come_back_to_a_cluster_that_lost_its_journal(lab: LabSwarm, alone: Alone) -> None:
    """With what they hold, and those that were thrown out stay out."""
    outcast = lab.stage(0)
    credentials = outcast.credentials
    lab.workers.remove(outcast)
    outcast.close()
    lab.cluster.revoke_node(outcast.node)
    lab.wait_serving(stages=3)
    lab.kill_cluster()
    lose_journal(lab.options)
    lab.options = replace(lab.options, recovers_journal=True)
    lab.open_cluster()
    lab.serve()
    with pytest.raises((LinkError, AuthError), match="has been removed"):
        dial_as(credentials, lab.cluster.url, "control")
    lab.wait_serving(stages=3)
    assert lab.ask(REQUEST) == alone.answer(REQUEST)
