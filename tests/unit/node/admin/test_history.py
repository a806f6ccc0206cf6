"""The history of a cluster: there after a restart, in ranges and pages, and never in anybody's way."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from shardcompute.control import events as happened
from shardcompute.core.errors import DiskFullError
from shardcompute.core.generation import Delta, GenerationRequest, Timings, TokenChoice
from shardcompute.node.admin.history import ClusterHistory
from shardcompute.node.telemetry.history_store import (
    DAY_S,
    EventView,
    HistoryLimits,
    HistoryRange,
    HistoryStore,
)
from shardcompute.node.telemetry.request_log import RequestLog, RequestView
from shardcompute.node.telemetry.usage import HOUR_S, UsageView
from support.swarm.fake_cluster import NOW_S, FakeCluster

ALL = HistoryRange(limit=1000)


class Clock:
    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Host:
    """A coordinator's process: it ends and another one begins, with the same file."""

    def __init__(self, path: Path | None, clock: Clock, **options: Any) -> None:
        self.cluster = FakeCluster()
        self.requests = RequestLog(wall_clock=clock)
        self.history = ClusterHistory(
            path, self.cluster.coordinator.state, self.requests, wall_clock=clock, **options
        )
        self.cluster.coordinator.listen(self.history.saw)

    def answer(self, key: str = "alice", tokens: int = 3) -> None:
        request = GenerationRequest((7,) * 5, 9, caller=key, request_id="")
        with self.requests.open("org/tiny", "org/tiny#1", request) as entry:
            for number in range(tokens):
                entry.saw(Delta("secret answer", (TokenChoice(number),)))
            entry.saw(Delta(finish="stop", timings=Timings(0.1, 0.2, 0.3, 5, tokens)))

    def texts(self, wanted: HistoryRange = ALL) -> list[str]:
        return [event.text for event in self.history.events(wanted).data]


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "history.sqlite"
    first = Host(path, clock)
    first.cluster.join("a")
    first.answer("alice")
    first.history.close()
    clock.now_s += 10 * HOUR_S
    second = Host(path, clock)
    second.answer("alice")
    second.answer("bob")
    texts = second.texts()
    assert [text.split(" (")[0] for text in texts] == [
        "the coordinator started",
        "the coordinator stopped",
        "A joined: 2 threads, 1000 bytes of memory",
        "the coordinator started",
    ]
    requests = second.history.requests(ALL).data
    assert [(view.key, view.model, view.generated_tokens, view.state) for view in requests] == [
        ("bob", "org/tiny", 3, "done"),
        ("alice", "org/tiny", 3, "done"),
        ("alice", "org/tiny", 3, "done"),
    ]
    usage = second.history.usage(ALL).data
    now_hour = clock.now_s - clock.now_s % HOUR_S
    assert [(each.start_s, each.key, each.requests, each.generated_tokens) for each in usage] == [
        (now_hour, "alice", 1, 3),
        (now_hour, "bob", 1, 3),
        (now_hour - 10 * HOUR_S, "alice", 1, 3),
    ]
    numbers = [event.number for event in second.history.events(ALL).data]
    assert numbers == [4, 3, 2, 1]
    assert [event.number for event in second.history.recent()] == [1, 2, 3, 4]
    second.history.close()


def test_usage_of_one_hour_adds_up_across_restarts(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "history.sqlite"
    for _ in range(3):
        host = Host(path, clock)
        host.answer()
        host.history.flush()
        host.answer()
        host.history.close()
    store = HistoryStore(path)
    (each,) = store.usage(ALL)
    assert (each.requests, each.prompt_tokens, each.generated_tokens) == (6, 30, 18)
    store.close()


def test_no_text_of_anybody_is_kept(tmp_path: Path) -> None:
    host = Host(tmp_path / "history.sqlite", Clock())
    host.answer()
    host.history.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"org/tiny" in content
    assert b"secret answer" not in content


def test_ranges_and_pages(tmp_path: Path) -> None:
    clock = Clock()
    host = Host(None, clock)
    host.history.flush()
    for number in range(10):
        clock.now_s = 2_000_000.0 + number * DAY_S
        host.history.tell(EventView(kind="model", text=f"event {number}"))
        host.answer(f"key {number}")
        host.history.flush()
    since = HistoryRange(since_s=2_000_000.0 + 3 * DAY_S, until_s=2_000_000.0 + 6 * DAY_S)
    assert host.texts(since) == ["event 5", "event 4", "event 3"]
    assert [view.key for view in host.history.requests(since).data] == ["key 5", "key 4", "key 3"]
    page = host.history.events(HistoryRange(limit=4))
    pages = [[event.text for event in page.data]]
    while page.next is not None:
        page = host.history.events(HistoryRange(limit=4, before=page.next))
        pages.append([event.text for event in page.data])
    assert [text for texts in pages for text in texts][:10] == [f"event {n}" for n in range(9, -1, -1)]
    assert max(map(len, pages)) == 4
    usage = host.history.usage(HistoryRange(limit=4), span_s=DAY_S)
    assert [each.key for each in usage.data] == ["key 9", "key 8", "key 7", "key 6"]
    assert usage.next is not None
    older = host.history.usage(HistoryRange(limit=100, before=usage.next), span_s=DAY_S)
    assert [each.key for each in older.data] == [f"key {n}" for n in range(5, -1, -1)]
    assert older.next is None
    host.history.close()


def test_it_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    path.touch(0o644)
    path.chmod(0o644)
    host = Host(path, Clock())
    host.history.flush()
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}
    host.history.close()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"")
    (tmp_path / "history.sqlite").symlink_to(target)
    host = Host(tmp_path / "history.sqlite", Clock())
    host.answer()
    page = host.history.requests(ALL)
    assert len(page.data) == 1
    assert "in memory only" in page.problem
    host.history.close()
    assert target.read_bytes() == b""


@pytest.mark.parametrize("content", [b"no database at all" * 99, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "history.sqlite"
    path.write_bytes(content)
    host = Host(path, Clock())
    host.answer()
    host.history.close()
    assert (tmp_path / "history.sqlite.aside").read_bytes() == content
    store = HistoryStore(path)
    assert len(store.requests(ALL)) == 1
    store.close()


def test_the_file_of_a_newer_release_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("pragma user_version = 99")
    connection.close()
    before = path.read_bytes()
    store = HistoryStore(path)
    assert store.events(ALL) == []
    store.close()
    assert (tmp_path / "history.sqlite.aside").read_bytes() == before


def test_a_full_disk_disturbs_nobody_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path / "history.sqlite", Clock())
    host.history.flush()
    write = HistoryStore.write

    def full(*_: Any) -> None:
        raise DiskFullError("no room", hint="free some")

    monkeypatch.setattr(HistoryStore, "write", full)
    for _ in range(5):
        host.answer()
        host.history.flush()
    page = host.history.requests(ALL)
    assert page.data == ()
    assert "no room" in page.problem
    monkeypatch.setattr(HistoryStore, "write", write)
    page = host.history.requests(ALL)
    assert (len(page.data), page.problem) == (5, "")
    assert host.history.usage(ALL).data[0].requests == 5
    host.history.close()


def test_the_last_of_a_disk_is_left_to_others(tmp_path: Path) -> None:
    host = Host(tmp_path / "history.sqlite", Clock(), limits=HistoryLimits(least_free_bytes=1 << 62))
    host.answer()
    assert "too little room" in host.history.requests(ALL).problem
    host.history.close()


def test_what_waits_to_be_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.node.admin.history._MOST_PENDING", 8)
    host = Host(None, Clock(), limits=HistoryLimits())
    monkeypatch.setattr(HistoryStore, "write", _refuse)
    for number in range(100):
        host.history.tell(EventView(kind="model", text=str(number)))
        host.answer(f"key {number}")
        host.history.flush()
    waiting = (host.history._events, host.history._requests, host.history._unsaved)
    assert [len(each) for each in waiting] == [8, 8, 8]  # type: ignore[arg-type]
    monkeypatch.undo()
    host.history.close()


def _refuse(*_: Any) -> None:
    raise DiskFullError("no room", hint="free some")


def test_old_and_many_entries_are_forgotten(tmp_path: Path) -> None:
    limits = HistoryLimits(events=10, requests=5, usage=4, days=1, usage_days=2)
    store = HistoryStore(tmp_path / "history.sqlite", limits)
    now_s = 100.0 * DAY_S
    store.write(
        [_event(number, now_s - (30 - number) * HOUR_S) for number in range(1, 31)],
        [_request(now_s - number) for number in range(20)],
        [_usage(now_s - number * 6 * HOUR_S) for number in range(20)],
    )
    store.prune(now_s)
    assert [event.number for event in store.events(ALL)] == list(range(30, 20, -1))
    assert len(store.requests(ALL)) == 5
    assert len(store.usage(ALL)) == 4
    store.prune(now_s + 3 * DAY_S)
    assert (store.events(ALL), store.requests(ALL), store.usage(ALL)) == ([], [], [])
    store.close()


def test_it_never_grows_past_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    host = Host(path, Clock(), limits=HistoryLimits(size_bytes=1 << 20, least_free_bytes=0))
    for number in range(60):
        for _ in range(100):
            host.history.tell(EventView(kind="model", text=f"{number} " + "x" * 900))
        host.history.flush()
    assert path.stat().st_size <= 1 << 20
    newest = host.history.events(HistoryRange(limit=100))
    assert newest.problem == ""
    assert {event.text.split()[0] for event in newest.data} == {"59"}
    host.history.close()


def test_those_who_listen_hear_every_event_since_the_start(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    Host(path, Clock()).history.close()
    host = Host(path, Clock())
    host.cluster.join("a")
    host.history.flush()
    heard: list[EventView] = []
    host.history.listen(heard.append)
    host.cluster.coordinator.post(happened.NodeLost("a", 1, "it was silent", NOW_S))
    host.history.flush()
    assert [event.text.split()[0:2] for event in heard] == [
        ["the", "coordinator"],
        ["A", "joined:"],
        ["A", "is"],
    ]
    host.history.close()


def test_its_thread_writes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.node.admin.history._WRITE_EVERY_S", 0.01)
    host = Host(tmp_path / "history.sqlite", Clock())
    host.history.start()
    host.answer()
    reader = sqlite3.connect(tmp_path / "history.sqlite")
    try:
        while not reader.execute("select count(*) from requests").fetchone()[0]:
            os.sched_yield()
    finally:
        reader.close()
        host.history.close()


def _event(number: int, at_s: float) -> EventView:
    return EventView(number=number, at_s=at_s, kind="node", text=f"event {number}")


def _request(started_at_s: float) -> RequestView:
    return RequestView(
        id="1", model="m", chain="m#1", state="done", prompt_tokens=1, generated_tokens=1,
        started_at_s=started_at_s, elapsed_s=0.5,
    )  # fmt: skip


def _usage(at_s: float) -> UsageView:
    return UsageView(
        start_s=at_s - at_s % HOUR_S, span_s=HOUR_S, key="k", model="m", requests=1, prompt_tokens=1,
        generated_tokens=1,
    )  # fmt: skip


def test_what_drivers_report_counts_once_over_restarts(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "history.sqlite"
    hour_s = clock.now_s - clock.now_s % HOUR_S

    def used(tokens: int, start_s: float = hour_s) -> list[UsageView]:
        return [
            UsageView(
                start_s=start_s,
                span_s=HOUR_S,
                key="bob",
                model="m",
                requests=1,
                prompt_tokens=tokens,
                generated_tokens=0,
            )
        ]

    host = Host(path, clock)
    host.history.count_report("driver:1", 1, used(5, hour_s - HOUR_S))
    host.history.count_report("driver:1", 2, used(7))
    host.history.count_report("driver:1", 2, used(7))
    assert [view.prompt_tokens for view in host.requests.usage.report().totals] == [12]
    # It was killed before anybody heard that the second was taken.
    host.history._store.close()
    again = Host(path, clock)
    again.history.count_report("driver:1", 2, used(7))
    again.history.count_report("driver:2", 1, used(100))
    found = again.history.usage(ALL).data
    assert [(view.start_s, view.prompt_tokens) for view in found] == [(hour_s, 107), (hour_s - HOUR_S, 5)]
    again.history.close()
