"""Only a refusal where somebody answered before proves that a process has ended."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.liveness import LivenessProbe

URL = "tcp://attic:1"


def refused() -> LinkError:
    error = LinkError("it cannot be reached")
    error.__cause__ = ConnectionRefusedError()
    return error


class Door:
    """Answers each knock as told; a link where nothing else was said."""

    def __init__(self) -> None:
        self.answers: list[LinkError] = []
        self.pauses: list[float] = []
        self.closed = 0

    def dial(self, url: str, node: str) -> Any:
        assert (url, node) == (URL, "n1")
        if self.answers:
            raise self.answers.pop(0)
        return SimpleNamespace(close=self._close)

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def doors(door: Door, monkeypatch: pytest.MonkeyPatch) -> LivenessProbe:
    """As if every thread ran at once."""
    found = LivenessProbe(door.dial, door.pauses.append)
    monkeypatch.setattr(found, "_start", lambda task: task())
    return found


def ended(doors: LivenessProbe, url: str = URL) -> bool:
    heard = threading.Event()
    doors.knock("n1", url, heard.set)
    return heard.is_set()


def test_a_refusal_is_an_end(doors: LivenessProbe, door: Door) -> None:
    doors.find("n1", URL)
    door.answers = [refused()]
    assert ended(doors)
    assert door.closed == 1


def test_an_answer_is_none(doors: LivenessProbe, door: Door) -> None:
    doors.find("n1", URL)
    assert not ended(doors)
    assert door.closed == 2


def test_silence_is_none_however_often_it_is_asked(doors: LivenessProbe, door: Door) -> None:
    doors.find("n1", URL)
    door.answers = [LinkError("timed out") for _ in range(9)]
    assert not ended(doors)
    assert len(door.pauses) == 2


def test_a_connection_that_dies_with_the_process_is_tried_again(doors: LivenessProbe, door: Door) -> None:
    doors.find("n1", URL)
    door.answers = [LinkError("connection reset"), refused()]
    assert ended(doors)


def test_where_nobody_has_answered_a_refusal_says_nothing(doors: LivenessProbe, door: Door) -> None:
    door.answers = [refused(), refused()]
    doors.find("n1", URL)
    assert not ended(doors)
    assert len(door.answers) == 1, "nobody was even asked"
    door.answers.clear()
    doors.find("n1", URL)
    assert not ended(doors, "tcp://attic:2"), "it listens elsewhere since"
