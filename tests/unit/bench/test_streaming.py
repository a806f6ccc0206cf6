"""Streamed answers: chunks and signs of life are told apart, failures are raised, several requests run at once."""

from __future__ import annotations

import threading

import httpx
import pytest

from shardcompute.bench.streaming import ask_at_once, chunks_of
from shardcompute.core.errors import BackendError


def answered(content: str, status: int = 200) -> httpx.Response:
    return httpx.Response(status, text=content)


def test_chunks_and_signs_of_life() -> None:
    pings: list[None] = []
    content = ': ping\n\ndata: {"n": 1}\n\n: ping\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    found = list(chunks_of(answered(content), lambda: pings.append(None)))
    assert found == [{"n": 1}, {"n": 2}]
    assert len(pings) == 2


def test_failures_say_what_the_server_says() -> None:
    with pytest.raises(BackendError, match="status 503: busy"):
        list(chunks_of(answered("busy", 503)))
    with pytest.raises(BackendError, match="the stream failed: gone"):
        list(chunks_of(answered('data: {"n": 1}\n\ndata: {"error": "gone"}\n\n')))


def test_all_are_asked_at_once_and_all_end_before_a_failure_is_raised() -> None:
    together = threading.Barrier(3)
    ended: list[int] = []

    def ask(number: int) -> int:
        together.wait(30)
        if number < 0:
            raise BackendError("no")
        ended.append(number)
        return -number

    assert ask_at_once([1, 2, 3], ask)[0] == [-1, -2, -3]
    ended.clear()
    with pytest.raises(BackendError, match="no"):
        ask_at_once([1, -2, 3], ask)
    assert sorted(ended) == [1, 3]
