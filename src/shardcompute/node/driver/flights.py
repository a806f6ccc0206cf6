"""Frames under way and how their time was spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.core.generation import Traversal
from shardcompute.core.steps import Frame
from shardcompute.wire import StageTiming


@dataclass(frozen=True, slots=True)
class Flight:
    """A frame that was sent, and when."""

    frame: Frame
    sent_s: float

    def landed(self, now_s: float, timings: Sequence[StageTiming]) -> Landing:
        queue_s = sum(timing.queue_s for timing in timings)
        codec_s = sum(timing.codec_s for timing in timings)
        compute_s = sum(timing.compute_s for timing in timings)
        draft_s = sum(timing.draft_s for timing in timings)
        seconds = now_s - self.sent_s
        return Landing(
            seconds=seconds,
            wire_s=max(seconds - queue_s - codec_s - compute_s - draft_s, 0.0),
            draft_s=draft_s,
            queue_s=queue_s,
            codec_s=codec_s,
            compute_s=compute_s,
            received_bytes=sum(timing.received_bytes for timing in timings),
            codecs=frozenset(timing.codec for timing in timings if timing.codec),
        )


@dataclass(frozen=True, slots=True)
class Landing:
    """A frame that came back: what it took, and of that the stages' own report."""

    seconds: float
    wire_s: float
    queue_s: float
    codec_s: float
    compute_s: float
    draft_s: float
    """Of that, the last stage's drafting."""
    received_bytes: int
    codecs: frozenset[str]


class Journey:
    """The frames that one generation took part in after its prompt."""

    def __init__(self) -> None:
        self.traversals = 0
        self._wire_s = self._queue_s = self._codec_s = self._compute_s = self._draft_s = 0.0
        self._received_bytes = 0
        self._codecs: frozenset[str] = frozenset()

    def add(self, landing: Landing) -> None:
        self.traversals += 1
        self._wire_s += landing.wire_s
        self._queue_s += landing.queue_s
        self._codec_s += landing.codec_s
        self._compute_s += landing.compute_s
        self._draft_s += landing.draft_s
        self._received_bytes += landing.received_bytes
        self._codecs |= landing.codecs

    def mean(self, draft_s: float) -> Traversal:
        count = max(self.traversals, 1)
        return Traversal(
            self._wire_s / count,
            self._queue_s / count,
            self._codec_s / count,
            self._compute_s / count,
            (draft_s + self._draft_s) / count,
            self._received_bytes / count,
            tuple(sorted(self._codecs)),
        )
