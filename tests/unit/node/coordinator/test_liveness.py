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


class Listener:
    """Answers each call as told; a link where nothing else was said."""

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
def listener() -> Listener:
    return Listener()


@pytest.fixture
def probe(listener: Listener) -> LivenessProbe:
    """As if every thread ran at once."""
    return LivenessProbe(listener.dial, lambda task: task(), listener.pauses.append)


def ended(probe: LivenessProbe, url: str = URL) -> bool:
    heard = threading.Event()
    probe.check("n1", url, heard.set)
    return heard.is_set()


def test_a_refusal_is_an_end(probe: LivenessProbe, listener: Listener) -> None:
    probe.learn("n1", URL)
    listener.answers = [refused()]
    assert ended(probe)
    assert listener.closed == 1


def test_an_answer_is_none(probe: LivenessProbe, listener: Listener) -> None:
    probe.learn("n1", URL)
    assert not ended(probe)
    assert listener.closed == 2


def test_silence_is_none_however_often_it_is_asked(probe: LivenessProbe, listener: Listener) -> None:
    probe.learn("n1", URL)
    listener.answers = [LinkError("timed out") for _ in range(9)]
    assert not ended(probe)
    assert len(listener.pauses) == 2


def test_a_connection_that_dies_with_the_process_is_tried_again(
    probe: LivenessProbe, listener: Listener
) -> None:
    probe.learn("n1", URL)
    listener.answers = [LinkError("connection reset"), refused()]
    assert ended(probe)


def test_where_nobody_has_answered_a_refusal_says_nothing(probe: LivenessProbe, listener: Listener) -> None:
    listener.answers = [refused(), refused()]
    probe.learn("n1", URL)
    assert not ended(probe)
    assert len(listener.answers) == 1, "nobody was even asked"
    listener.answers.clear()
    probe.learn("n1", URL)
    assert not ended(probe, "tcp://attic:2"), "it listens elsewhere since"
