"""Usage accounting: tokens by API key and model, by the minute for an hour and by the hour for a week.

Kept in memory and bounded: keys and models beyond the first few hundred pairs are counted together as "others".
Counting starts with the process; what has come since the last time is there to be taken, for a history that lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

OTHERS = "others"
_MOST_PAIRS = 256
HOUR_S = 3600
_SPANS = ((60, 60), (HOUR_S, 168))
"""Seconds of a span, and how many spans are kept."""
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageView:
    """What one key asked of one model during `[start_s, start_s + span_s)`; `span_s` 0 is all of it."""

    start_s: float
    span_s: int
    key: str
    model: str
    requests: int
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    since_s: float
    totals: tuple[UsageView, ...]
    minutes: tuple[UsageView, ...]
    hours: tuple[UsageView, ...]

    def of_key(self, key: str) -> UsageReport:
        """What was asked with this key, and nobody else's."""
        totals, minutes, hours = (
            tuple(view for view in views if view.key == key)
            for views in (self.totals, self.minutes, self.hours)
        )
        return UsageReport(since_s=self.since_s, totals=totals, minutes=minutes, hours=hours)


class UsageTally:
    """Counts of one key and model."""

    __slots__ = ("generated_tokens", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.generated_tokens = 0

    def add(self, requests: int, prompt_tokens: int, generated_tokens: int) -> None:
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens


Spans = dict[float, dict[Pair, UsageTally]]
"""By their start."""


class UsageCounter:
    """Methods may be called from any thread."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time, most_pairs: int = _MOST_PAIRS) -> None:
        self._wall_clock = wall_clock
        self._most_pairs = most_pairs
        self._lock = threading.Lock()
        self._since_s = wall_clock()
        self._totals: dict[Pair, UsageTally] = {}
        self._spans: dict[int, Spans] = {span_s: {} for span_s, _ in _SPANS}
        self._increments: Spans = {}

    def add(
        self, key: str, model: str, *, requests: int = 0, prompt_tokens: int = 0, generated_tokens: int = 0
    ) -> None:
        now_s = self._wall_clock()
        with self._lock:
            pair = (key, model)
            if pair not in self._totals and len(self._totals) >= self._most_pairs:
                pair = (OTHERS, OTHERS)
            tallies = [self._totals.setdefault(pair, UsageTally())]
            for span_s, kept in _SPANS:
                start_s = now_s - now_s % span_s
                spans = self._spans[span_s]
                tallies.append(spans.setdefault(start_s, {}).setdefault(pair, UsageTally()))
                _forget(spans, start_s - (kept - 1) * span_s)
            # The last span is an hour.
            tallies.append(self._increments.setdefault(start_s, {}).setdefault(pair, UsageTally()))
            _forget(self._increments, start_s - (kept - 1) * span_s)
            for tally in tallies:
                tally.add(requests, prompt_tokens, generated_tokens)

    def merge(self, views: Iterable[UsageView]) -> None:
        """Add what was counted elsewhere, to the hours in which it was."""
        with self._lock:
            for view in views:
                pair = (view.key, view.model)
                if pair not in self._totals and len(self._totals) >= self._most_pairs:
                    pair = (OTHERS, OTHERS)
                kept = (self._spans[HOUR_S], self._increments)
                tallies = [
                    spans.setdefault(view.start_s, {}).setdefault(pair, UsageTally()) for spans in kept
                ]
                for tally in (self._totals.setdefault(pair, UsageTally()), *tallies):
                    tally.add(view.requests, view.prompt_tokens, view.generated_tokens)

    def report(self) -> UsageReport:
        now_s = self._wall_clock()
        with self._lock:
            for span_s, kept in _SPANS:
                _forget(self._spans[span_s], now_s - now_s % span_s - (kept - 1) * span_s)
            minutes, hours = (tuple(self._views(span_s)) for span_s, _ in _SPANS)
            totals = tuple(_view(self._since_s, 0, *each) for each in sorted(self._totals.items(), key=_pair))
        return UsageReport(since_s=self._since_s, totals=totals, minutes=minutes, hours=hours)

    def take_increments(self) -> list[UsageView]:
        """What was added since this was last asked for, by the hour."""
        with self._lock:
            taken, self._increments = self._increments, {}
        return list(_views(taken, HOUR_S))

    def _views(self, span_s: int) -> Iterable[UsageView]:
        return _views(self._spans[span_s], span_s)


def add_usage(one: UsageView, other: UsageView) -> UsageView:
    """Both together, of the same span, key and model."""
    return replace(
        one,
        requests=one.requests + other.requests,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        generated_tokens=one.generated_tokens + other.generated_tokens,
    )


def _views(spans: Spans, span_s: int) -> Iterable[UsageView]:
    for start_s, tallies in sorted(spans.items()):
        for pair, tally in sorted(tallies.items(), key=_pair):
            yield _view(start_s, span_s, pair, tally)


def _forget(spans: Spans, oldest_s: float) -> None:
    for start_s in [start_s for start_s in spans if start_s < oldest_s]:
        del spans[start_s]


def _pair(item: tuple[Pair, UsageTally]) -> Pair:
    return item[0]


def _view(start_s: float, span_s: int, pair: Pair, tally: UsageTally) -> UsageView:
    return UsageView(
        start_s=start_s,
        span_s=span_s,
        key=pair[0],
        model=pair[1],
        requests=tally.requests,
        prompt_tokens=tally.prompt_tokens,
        generated_tokens=tally.generated_tokens,
    )
