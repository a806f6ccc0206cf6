"""One line of a kind for each stranger in a while."""

from __future__ import annotations

import logging

import pytest

from shardcompute.core.rate_limited_log import RateLimitedLog


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sparing(clock: Clock, caplog: pytest.LogCaptureFixture) -> RateLimitedLog:
    caplog.set_level(logging.DEBUG)
    return RateLimitedLog(logging.getLogger("strangers"), every_s=60.0, most_keys=3, clock=clock)


def test_what_is_repeated_is_told_once(sparing: RateLimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        sparing.info("a", "dropped: %d", number)
    assert caplog.messages == ["dropped: 0"]


def test_what_was_kept_back_is_counted(
    sparing: RateLimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        sparing.warning("a", "100%% dropped: %s", "x")
    clock.now_s += 59.0
    sparing.warning("a", "100%% dropped: %s", "x")
    clock.now_s += 1.0
    sparing.warning("a", "100%% dropped: %s", "y")
    clock.now_s += 60.0
    sparing.warning("a", "100%% dropped: %s", "z")
    assert caplog.messages == [
        "100% dropped: x",
        "100% dropped: y (and 4 like it before)",
        "100% dropped: z",
    ]


def test_each_stranger_and_each_kind_has_a_line(
    sparing: RateLimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    sparing.info("a", "dropped")
    sparing.info("b", "dropped")
    sparing.warning("a", "refused")
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", "dropped"),
        ("INFO", "dropped"),
        ("WARNING", "refused"),
    ]


def test_many_strangers_take_no_memory(sparing: RateLimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        sparing.info(str(number), "dropped")
    assert len(sparing._told) == 3
    sparing.info("999", "dropped")
    assert len(caplog.messages) == 1000


def test_lines_name_where_they_come_from(sparing: RateLimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("inner")
    except ValueError:
        sparing.error("a", "failed", exc_info=True)
    [record] = caplog.records
    assert record.filename == "test_rate_limited_log.py"
    assert record.exc_info is not None
    assert record.levelname == "ERROR"
