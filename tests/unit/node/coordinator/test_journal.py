"""The coordinator's memory, whole and damaged."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from shardcompute.core.errors import DiskFullError, JournalError, SourceError
from shardcompute.node.coordinator.journal import Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster" / "journal.sqlite"


def opened(path: Path) -> contextlib.closing[Journal]:
    return contextlib.closing(Journal(path))


def alter(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_events_come_back_in_order(path: Path) -> None:
    with opened(path) as journal:
        assert list(journal.events()) == []
        for number in range(20):
            journal.append(b"event %d" % number)
    with opened(path) as journal:
        journal.append(b"last")
        assert list(journal.events()) == [*(b"event %d" % number for number in range(20)), b"last"]


def test_notes_are_kept_by_name(path: Path) -> None:
    with opened(path) as journal:
        assert journal.read_note("tokens") is None
        journal.write_note("tokens", b"one")
        journal.write_note("keys", b"")
        journal.write_note("tokens", b"two")
    with opened(path) as journal:
        assert (journal.read_note("tokens"), journal.read_note("keys")) == (b"two", b"")


def test_compacts(path: Path) -> None:
    with opened(path) as journal:
        journal.append(b"long")
        journal.append(b"story")
        journal.compact([b"short"])
        journal.append(b"more")
        assert list(journal.events()) == [b"short", b"more"]


def test_a_compaction_that_fails_changes_nothing(path: Path) -> None:
    with opened(path) as journal:
        journal.append(b"long")
        with pytest.raises(JournalError, match="NOT NULL"):
            journal.compact([b"short", None])  # type: ignore[list-item]
        journal.append(b"story")
        assert list(journal.events()) == [b"long", b"story"]


def test_what_was_appended_survives_without_a_goodbye(path: Path) -> None:
    journal = Journal(path)
    journal.append(b"here")
    with opened(path) as other:
        assert list(other.events()) == [b"here"]
    journal.close()


def test_its_folder_is_for_its_owner_alone(path: Path) -> None:
    with opened(path):
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_newer_journal_is_left_alone(path: Path) -> None:
    with opened(path):
        pass
    alter(path, "update format set version = 2")
    with pytest.raises(SourceError, match="newer release"):
        Journal(path)


@pytest.mark.parametrize("content", [b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_file_that_is_no_journal(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(JournalError, match="is damaged"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_file_that_is_cut_short(path: Path) -> None:
    with opened(path) as journal:
        for _ in range(100):
            journal.append(b"x" * 1000)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(JournalError, match="is damaged"):
        Journal(path)


def test_pages_that_are_damaged(path: Path) -> None:
    with opened(path) as journal:
        for _ in range(100):
            journal.append(b"x" * 1000)
        journal.write_note("keys", b"k")
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(JournalError, match="--recover-journal"):
        Journal(path)


def test_values_of_other_types_are_bytes_too(path: Path) -> None:
    """Nothing but damage or a curious user puts them there; a number must not become so many zeros."""
    with opened(path) as journal:
        journal.append(b"first")
    alter(
        path,
        "insert into events (event) values ('text')",
        "insert into events (event) values (1000000000000)",
        "insert into notes (name, value) values ('keys', 1000000000000)",
    )
    with opened(path) as journal:
        assert list(journal.events()) == [b"first", b"text", b"1000000000000"]
        assert journal.read_note("keys") == b"1000000000000"


def test_a_full_disk(path: Path) -> None:
    with opened(path) as journal:
        journal._connection.execute("pragma max_page_count = 10")
        with pytest.raises(DiskFullError, match="no room"):
            journal.append(b"x" * 100_000)
        journal.append(b"small")
        count = len(list(journal.events()))
        journal._connection.execute("pragma max_page_count = 1000")
        journal.append(b"again")
        assert len(list(journal.events())) == count + 1


def test_a_folder_that_cannot_be_written(path: Path) -> None:
    path.parent.mkdir()
    path.mkdir()
    with pytest.raises(SourceError, match="Is a directory"):
        Journal(path)
