"""Backups of a cluster: what is in them comes back, what is damaged or another's does not."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from shardcompute.control.events import NodeDrained, encode_event
from shardcompute.core.errors import SourceError, UsageError
from shardcompute.node.cluster import authority_folder, create_authority, find_authority
from shardcompute.node.coordinator.journal import JOURNAL_FILE, bind_journal, open_journal
from shardcompute.node.coordinator.shared import Leadership
from shardcompute.node.process.backup import (
    ClusterBackup,
    open_file_journal,
    read_backup,
    restore_to_folder,
    write_backup,
)
from shardcompute.node.process.candidacy import read_shared, restore_shared
from shardcompute.security import KeyBook, Revocations, TokenBook
from shardcompute.security.revocations import load_revocations, save_revocations
from support.swarm.fake_store import FakeStore

EVENT = encode_event(NodeDrained("n"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cluster with a key, a token and somebody who was thrown out."""
    made = tmp_path / "cluster"
    authority = create_authority(made, "home")
    keys, _ = KeyBook().create(label="me", now_s=1.0)
    tokens, _ = TokenBook().create(
        addresses=["a:1"], fingerprint=authority.fingerprint, cluster="home", now_s=1.0
    )
    with closing(open_journal(made, None)) as journal:
        bind_journal(journal, authority.fingerprint)
        journal.append(EVENT, EVENT)
        journal.write_note("keys", keys.to_bytes())
        journal.write_note("tokens", tokens.to_bytes())
    save_revocations(authority_folder(made), Revocations(frozenset({"outcast"})))
    return made


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "home.backup"
    with closing(open_file_journal(folder)) as journal:
        said = write_backup(path, folder, journal)
    assert said == "2 events, 1 API key, 1 join token, 1 thrown out"
    return path


def test_a_cluster_comes_back_whole(folder: Path, file: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    assert restore_to_folder(read_backup(file), elsewhere).has_journal
    was, now = find_authority(folder), find_authority(elsewhere)
    assert was is not None
    assert now is not None
    assert now.fingerprint == was.fingerprint
    assert load_revocations(authority_folder(elsewhere)) == Revocations(frozenset({"outcast"}))
    with closing(open_file_journal(folder)) as before, closing(open_file_journal(elsewhere)) as after:
        assert list(after.events()) == list(before.events())
        assert after.read_notes() == before.read_notes()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_it_is_for_its_owner_alone(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nothing_is_overwritten(folder: Path, file: Path) -> None:
    with closing(open_file_journal(folder)) as journal, pytest.raises(UsageError, match="exists"):
        write_backup(file, folder, journal)
    with closing(open_file_journal(folder)) as journal:
        journal.append(EVENT)
    assert not restore_to_folder(read_backup(file), folder).has_journal
    with closing(open_file_journal(folder)) as journal:
        assert len(list(journal.events())) == 3, "the journal that is there stays"
    assert restore_to_folder(read_backup(file), folder, replaces=True).has_journal
    with closing(open_file_journal(folder)) as journal:
        assert len(list(journal.events())) == 2
    assert list(folder.glob("journal.replaced-*.sqlite"))


def test_who_was_thrown_out_since_stays_out(folder: Path, file: Path) -> None:
    save_revocations(authority_folder(folder), Revocations(frozenset({"outcast", "later"})))
    (folder / JOURNAL_FILE).unlink()
    assert restore_to_folder(read_backup(file), folder).has_journal
    assert load_revocations(authority_folder(folder)) == Revocations(frozenset({"outcast", "later"}))


def test_a_folder_of_another_cluster_is_left_alone(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    create_authority(other, "home")
    with pytest.raises(UsageError, match="another cluster"):
        restore_to_folder(read_backup(file), other)


@pytest.mark.parametrize("place", [0, 30, 60, -1])
def test_a_damaged_backup_is_refused(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(SourceError, match="no backup that can be used"):
        read_backup(file)


def test_what_is_no_backup_is_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        read_backup(tmp_path / "none")
    with pytest.raises(UsageError, match="no cluster"):
        open_file_journal(tmp_path / "none")


def test_it_goes_into_a_store_and_out_of_it_again(file: Path, tmp_path: Path) -> None:
    store, backup = FakeStore(), read_backup(file)
    one, two = tmp_path / "one", tmp_path / "two"
    assert restore_shared(backup, one, store.client()).has_journal
    assert not restore_shared(backup, two, store.client()).has_journal, "it has the cluster's journal"
    again = tmp_path / "again.backup"
    write_backup(again, two, read_shared(two, store.client()))
    known: ClusterBackup = read_backup(again)
    assert known.notes == backup.notes
    assert known.events == backup.events
    assert restore_shared(backup, two, store.client(), replaces=True).has_journal
    assert Leadership(store.client(), "/shardcompute/home/", "somebody").try_to_lead()
    with pytest.raises(UsageError, match="stop all of them"):
        restore_shared(backup, two, store.client(), replaces=True)
