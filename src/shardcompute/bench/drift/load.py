"""Steady load of `bench drift`: so many streams, one answer after the other, and when each piece of text came."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardcompute.bench.questions import QUESTIONS
from shardcompute.bench.wan.cluster import WanCluster
from shardcompute.core.errors import BackendError, ShardComputeError

_END_S = 120.0


class _EnoughError(Exception):
    """Nobody wants the rest of the answer."""


@dataclass(slots=True)
class Load:
    """What clients have seen so far. Methods may be called from any thread."""

    arrivals_s: list[float] = field(default_factory=list)
    """By `time.monotonic`, of all streams."""
    answers: dict[str, list[str]] = field(default_factory=dict)
    """By question, whole ones."""
    problems: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def came(self, now_s: float, gap_s: float) -> None:
        with self._lock:
            self.arrivals_s.append(now_s)
            self.longest_gap_s = max(self.longest_gap_s, gap_s)

    def answered(self, question: str, text: str) -> None:
        with self._lock:
            self.answers.setdefault(question, []).append(text)

    def failed(self, problem: str) -> None:
        with self._lock:
            self.problems.append(problem)

    def rate(self, since_s: float, until_s: float) -> float:
        """Pieces a second, of all streams together."""
        with self._lock:
            count = sum(since_s <= at_s < until_s for at_s in self.arrivals_s)
        return count / (until_s - since_s) if until_s > since_s else 0.0

    def restart_gaps(self) -> None:
        with self._lock:
            self.longest_gap_s = 0.0

    @property
    def whole_answers(self) -> int:
        return sum(len(texts) for texts in self.answers.values())

    @property
    def is_same(self) -> bool:
        """Whether every question had one answer, however often it was asked."""
        return all(len(set(texts)) == 1 for texts in self.answers.values())


@contextmanager
def load(cluster: WanCluster, streams: int, tokens: int) -> Iterator[Load]:
    """`streams` clients ask until the block is left. BackendError where an answer failed."""
    found, over = Load(), threading.Event()
    threads = [
        threading.Thread(target=_ask_on, args=(cluster, question, tokens, found, over), daemon=True)
        for question in QUESTIONS[:streams]
    ]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        over.set()
        for thread in threads:
            thread.join(_END_S)
    if found.problems:
        raise BackendError(f"an answer failed: {found.problems[0]}", hint="the logs of the cluster say why")


def _ask_on(cluster: WanCluster, question: str, tokens: int, found: Load, over: threading.Event) -> None:
    number = 0
    while not over.is_set():
        number += 1
        last_s = 0.0

        def on_piece(_: int) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            found.came(now_s, now_s - last_s if last_s else 0.0)
            last_s = now_s
            if over.is_set():
                raise _EnoughError

        try:
            answer = cluster.ask(_body(question, tokens, number), on_piece=on_piece)
        except _EnoughError:
            return
        except (ShardComputeError, OSError) as error:
            found.failed(str(error))
            return
        found.answered(question, answer.text)


def _body(question: str, tokens: int, number: int) -> Mapping[str, Any]:
    """With another salt nothing that was computed before is used again."""
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "speculation": {"drafter": "off"},
        "cache_salt": f"{question} {number}",
    }
