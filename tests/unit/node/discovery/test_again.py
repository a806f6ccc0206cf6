"""Finding the coordinator again: every way is asked, none too often, and one that fails hinders nobody."""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.core.errors import BackendError, LinkError
from shardcompute.node.discovery.again import LEAST_PAUSE_S, PacedSearch


def test_all_ways_are_asked_and_failures_pass() -> None:
    def failing() -> Sequence[str]:
        raise LinkError("no multicast here")

    def missing() -> Sequence[str]:
        raise BackendError("zeroconf is not installed")

    finder = PacedSearch([failing, lambda: ["tcp://a:1", "tcp://b:1"], missing, lambda: ["tcp://a:1"]])
    assert finder() == ["tcp://a:1", "tcp://b:1"]


def test_nobody_is_asked_too_often() -> None:
    now_s, asked = [0.0], []

    def search() -> Sequence[str]:
        asked.append(now_s[0])
        return ["tcp://a:1"]

    finder = PacedSearch([search], lambda: now_s[0])
    for at_s in (0.0, 1.0, LEAST_PAUSE_S - 1, LEAST_PAUSE_S, LEAST_PAUSE_S + 1):
        now_s[0] = at_s
        finder()
    assert asked == [0.0, LEAST_PAUSE_S]
