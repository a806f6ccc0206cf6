"""What is put on record, when the disk takes it and when it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.control import ClusterState
from shardcompute.core.errors import DiskFullError, JournalError, SourceError
from shardcompute.node.coordinator.journal import DiskReserve, Journal, JournalWriter, Replayed

EMPTY = ClusterState()


class FailingJournal(Journal):
    """A journal on a disk that may be full."""

    failure: SourceError | None = None
    attempts = 0

    @contextlib.contextmanager
    def _writing(self, *, is_durable: bool = False) -> Iterator[None]:
        self.attempts += 1
        if self.failure is not None:
            raise self.failure
        with super()._writing(is_durable=is_durable):
            yield


class Desk:
    """A writer, its journal and its clock."""

    def __init__(self, folder: Path, *, unread: frozenset[int] = frozenset(), most_events: int = 50) -> None:
        self.journal = FailingJournal(folder / "journal.sqlite")
        self.reserve = DiskReserve(folder / "journal.reserve", 4096)
        self.now_s = 100.0
        self.writer = JournalWriter(
            self.journal,
            Replayed(EMPTY, len(unread), 0, unread),
            lambda: b"all of it",
            reserve=self.reserve,
            clock=lambda: self.now_s,
            most_events=most_events,
        )

    def fill_disk(self, failure: SourceError | None = None) -> None:
        self.journal.failure = failure or DiskFullError("no room to write /secret/place")

    def free_disk(self) -> None:
        self.journal.failure = None

    def pass_time(self, seconds: float = 2.0) -> None:
        self.now_s += seconds
        self.writer.turn()

    @property
    def events(self) -> list[bytes]:
        return list(self.journal.events())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.journal.close()


def test_what_does_not_fit_waits_and_comes_before_anything_newer(desk: Desk) -> None:
    desk.writer.append(b"1")
    desk.fill_disk()
    for event in (b"2", b"3"):
        desk.writer.append(event)
    assert desk.writer.status.waiting == 2
    [warning] = desk.writer.status.warnings
    assert "2 changes of the cluster are not on record (the coordinator's disk is full)" in warning
    assert "/secret" not in warning, "it is told to everybody"
    desk.pass_time()
    assert desk.writer.status.waiting == 2
    desk.free_disk()
    desk.writer.append(b"4")
    desk.pass_time()
    assert desk.events == [b"1", b"2", b"3", b"4"]
    desk.pass_time()
    assert desk.writer.status.warnings == ()


def test_a_full_disk_is_not_tried_at_every_event(desk: Desk) -> None:
    desk.fill_disk()
    desk.writer.append(b"first")
    before = desk.journal.attempts
    for _ in range(100):
        desk.writer.append(b"more")
        desk.writer.turn()
    assert desk.journal.attempts == before
    desk.pass_time()
    assert desk.journal.attempts == before + 1


def test_very_much_that_waits_becomes_what_it_led_to(desk: Desk) -> None:
    desk.writer.append(b"before")
    desk.fill_disk()
    for _ in range(5000):
        desk.writer.append(b"x" * 400)
    assert desk.writer._waiting_bytes < 2 << 20
    assert desk.writer.status.waiting == 5000
    desk.free_disk()
    desk.pass_time()
    desk.writer.append(b"after")
    assert desk.events == [b"all of it", b"after"]
    assert desk.writer.status.waiting == 0


def test_a_long_journal_is_replaced_by_its_outcome_while_it_runs(tmp_path: Path) -> None:
    desk = Desk(tmp_path, most_events=20)
    for number in range(1000):
        desk.writer.append(b"%d" % number)
        desk.now_s += 1.0
        assert len(desk.events) <= 21
    assert desk.events[0] == b"all of it"
    assert desk.events[-1] in (b"999", b"all of it")
    desk.journal.close()


def test_a_journal_of_large_events_is_replaced_too(desk: Desk) -> None:
    for _ in range(20):
        desk.writer.append(b"x" * (1 << 20))
        desk.now_s += 1.0
    assert sum(map(len, desk.events)) <= 6 << 20
    assert desk.journal.path.stat().st_size <= 16 << 20


def test_what_a_newer_release_wrote_stays(tmp_path: Path) -> None:
    with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.append(b"of a later release", b"known")
    desk = Desk(tmp_path, unread=frozenset({1}), most_events=5)
    for _ in range(50):
        desk.writer.append(b"known")
        desk.now_s += 1.0
    assert desk.events[:2] == [b"of a later release", b"all of it"]
    assert len(desk.events) < 10
    desk.journal.close()


def test_an_outcome_that_cannot_be_written_stops_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFullError("no room")

    monkeypatch.setattr(desk.journal, "compact", full)
    for number in range(200):
        desk.writer.append(b"%d" % number)
    assert len(desk.events) == 200
    assert desk.writer.status.waiting == 0


def test_the_reserve_is_given_up_and_taken_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.reserve.is_held

    class OnceFull(FailingJournal):
        """Full as long as the reserve takes the last room."""

        @contextlib.contextmanager
        def _writing(self, *, is_durable: bool = False) -> Iterator[None]:
            self.failure = DiskFullError("no room") if desk.reserve.is_held else None
            with super()._writing(is_durable=is_durable):
                yield

    desk.journal.__class__ = OnceFull
    assert desk.writer.keep("revoked", lambda: desk.journal.write_note("revoked", b"n"))
    assert desk.journal.read_note("revoked") == b"n"
    assert desk.writer.status.warnings == ("the coordinator's disk is nearly full: free some space",)
    desk.journal.__class__ = FailingJournal
    desk.pass_time(60.0)
    assert desk.reserve.is_held
    assert desk.writer.status.warnings == ()
    desk.journal.close()


def test_notes_wait_by_name_and_the_newest_counts(desk: Desk) -> None:
    desk.fill_disk()
    assert not desk.writer.keep("keys", lambda: desk.journal.write_note("keys", b"old"))
    assert not desk.writer.keep("keys", lambda: desk.journal.write_note("keys", b"new"))
    assert desk.writer.status.waiting == 1
    desk.free_disk()
    desk.pass_time()
    assert desk.journal.read_note("keys") == b"new"
    assert desk.writer.status.waiting == 0


def test_what_waits_does_not_take_the_place_of_what_is_newer(desk: Desk) -> None:
    desk.fill_disk()
    assert not desk.writer.keep("tokens", lambda: desk.journal.write_note("tokens", b"old"))
    with pytest.raises(DiskFullError):
        desk.writer.write("tokens", lambda: desk.journal.write_note("tokens", b"never"))
    desk.free_disk()
    desk.writer.write("tokens", lambda: desk.journal.write_note("tokens", b"new"))
    desk.pass_time()
    assert desk.journal.read_note("tokens") == b"new"
    assert desk.writer.status.waiting == 0


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (JournalError("it is damaged"), "the coordinator's journal is damaged"),
        (SourceError("disk I/O error"), "the coordinator's disk refuses it"),
    ],
)
def test_other_failures_stop_nothing_either(desk: Desk, failure: SourceError, said: str) -> None:
    desk.fill_disk(failure)
    desk.writer.append(b"1")
    assert desk.writer.status.reason == said


def test_stopping_writes_what_waits(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.fill_disk()
    desk.writer.append(b"1")
    desk.writer.close()
    assert "stopping, although 1 change of the cluster is not on record" in caplog.text
    desk.free_disk()
    desk.writer.close()
    assert desk.events == [b"1"]


def test_notes_are_on_the_disk_before_anything_follows(tmp_path: Path) -> None:
    """In a power cut, events may lose their end; who was thrown out must not be forgotten."""
    with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
        statements: list[str] = []
        journal._connection.set_trace_callback(statements.append)
        journal.append(b"event")
        assert "pragma synchronous=full" not in statements
        journal.write_note("revocations", b"n")
        inserted = next(n for n, each in enumerate(statements) if "into notes" in each)
        assert "pragma synchronous=full" in statements[:inserted]
        assert "pragma synchronous=normal" not in statements[:inserted]
        [level] = journal._connection.execute("pragma synchronous").fetchone()
        assert level == 1
