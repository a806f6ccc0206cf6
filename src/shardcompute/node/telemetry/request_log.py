"""Request log: the generations that run now and ran lately, for people to see.

An entry lives as long as its `with` block; how the block ends is how the generation ended. No text and no token
is kept, only counts and times. What stages did is looked at whenever tokens come: of the chain's newest step, which
other generations may have shared.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from shardcompute.core.errors import ShardComputeError
from shardcompute.core.generation import Delta, GenerationRequest, Interruption, Timings
from shardcompute.node.telemetry.usage import UsageCounter
from shardcompute.wire import StageTiming

log = logging.getLogger(__name__)
_RATE_WINDOW_S = 5.0
StageTimes = Callable[[str], Sequence[StageTiming]]
"""What the stages of a chain did for its newest step."""


RequestState = Literal["waiting", "prefill", "decode", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """What a stage did for one generation: times of the steps that were looked at, added up."""

    node: str
    steps: int
    queue_s: float
    compute_s: float
    codec_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One generation. Times are known as far as it has come; `finish` says how a done one ended."""

    id: str
    model: str
    chain: str
    state: RequestState
    prompt_tokens: int
    generated_tokens: int
    started_at_s: float
    elapsed_s: float
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tokens_per_s: float = 0.0
    """After the first token."""
    finish: str = ""
    error: str = ""
    key: str = ""
    """The public name of the API key that asked; "" where none was asked for."""
    stages: tuple[StageShare, ...] = ()
    """In the order of the chain; they share the time of prefill and decode with the links between them."""
    traversals: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, which the chain still knew."""
    interrupted_s: float = 0.0
    """Waited for another chain; no part of prefill and decode."""
    interruptions: tuple[Interruption, ...] = ()
    session: str = ""
    """The number under which the chain's stages know it, as text: it may have more digits than JSON's readers keep."""


_COUNT_S = 0.25
"""So long tokens may wait to be counted."""


class RequestEntry:
    """One generation, from its request to its end."""

    def __init__(self, log: RequestLog, id: str, model: str, chain: str, request: GenerationRequest) -> None:
        self.has_started: Callable[[], bool] = lambda: False
        """Whether the chain works on it yet."""
        self.session: int | None = None
        """The number under which the chain's stages know it."""
        self._log = log
        self.ended_as = 0
        """How many had ended when this one did; 0 while it runs."""
        self.id, self._model, self._chain = id, model, chain
        self._key = request.caller
        self._stages = _StageSums()
        self._prompt_tokens = len(request.prompt)
        self._generated = 0
        self._uncounted = 0
        self._counted_s = 0.0
        self._submitted_s = log.clock()
        self._started_at_s = log.wall_clock()
        self._first_token_s: float | None = None
        self._ended_s: float | None = None
        self._timings: Timings | None = None
        self._interruptions: list[Interruption] = []
        self._state: RequestState | None = None
        self._finish = ""
        self._error = ""

    def saw(self, delta: Delta) -> None:
        now = self._log.clock()
        if delta.tokens:
            is_first, self._first_token_s = self._first_token_s is None, self._first_token_s or now
            self._generated += len(delta.tokens)
            self._uncounted += len(delta.tokens)
            if is_first or delta.finish is not None or now - self._counted_s > _COUNT_S:
                self._count(now, is_first=is_first)
            self._stages.add(self._log.stage_times(self._chain))
        if delta.interruption is not None:
            self._interruptions.append(delta.interruption)
        if delta.finish is not None:
            self._finish, self._timings = delta.finish, delta.timings

    def _count(self, now: float, *, is_first: bool = False) -> None:
        """All that came in a while together: counters are shared, and have locks."""
        tokens, self._uncounted, self._counted_s = self._uncounted, 0, now
        if not tokens:
            return
        self._log.count(tokens, now)
        self._log.usage.add(
            self._key,
            self._model,
            requests=int(is_first),
            prompt_tokens=self._prompt_tokens if is_first else 0,
            generated_tokens=tokens,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_s = self._log.clock()
        self._count(self._ended_s)
        if self._finish:
            self._state = "cancelled" if self._finish == "cancelled" else "done"
        elif isinstance(error, ShardComputeError):
            self._state, self._error = "failed", error.message
        elif isinstance(error, Exception):
            self._state, self._error = "failed", type(error).__name__
        else:
            self._state = "cancelled"
        self._log.close(self)

    def view(self) -> RequestView:
        now = self._log.clock() if self._ended_s is None else self._ended_s
        timings = self._timings
        interruptions = tuple(self._interruptions)
        pause_s = sum(each.pause_s for each in interruptions if each.after_tokens)
        decode_s = None if self._first_token_s is None else max(now - self._first_token_s - pause_s, 0.0)
        rate = (self._generated - 1) / decode_s if decode_s and self._generated > 1 else 0.0
        return RequestView(
            id=self.id,
            model=self._model,
            chain=self._chain,
            state=self._state or self._live_state(),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            started_at_s=self._started_at_s,
            elapsed_s=now - self._submitted_s,
            queue_s=timings.queue_s if timings else None,
            prefill_s=timings.prefill_s if timings else None,
            decode_s=timings.decode_s if timings else decode_s,
            tokens_per_s=timings.decode_tokens_per_s if timings else rate,
            finish=self._finish,
            error=self._error,
            key=self._key,
            stages=self._stages.views(),
            traversals=timings.traversals if timings else 0,
            drafted_tokens=timings.drafted_tokens if timings else 0,
            accepted_tokens=timings.accepted_tokens if timings else 0,
            cached_tokens=timings.cached_tokens if timings else 0,
            interrupted_s=timings.interrupted_s if timings else sum(each.pause_s for each in interruptions),
            interruptions=interruptions,
            session="" if self.session is None else str(self.session),
        )

    def _live_state(self) -> RequestState:
        if self._generated:
            return "decode"
        return "prefill" if self.has_started() else "waiting"


class _StageSums:
    """Times of a chain's stages, added up step by step."""

    def __init__(self) -> None:
        self._newest: Sequence[StageTiming] = ()
        self._sums: dict[str, list[float]] = {}

    def add(self, step: Sequence[StageTiming]) -> None:
        if step is self._newest:
            return
        self._newest = step
        # After a repair others are at work: those of the newest shape come in its order, former ones before them.
        for timing in step:
            sums = self._sums.pop(timing.node, [0, 0.0, 0.0, 0.0])
            added = (1, timing.queue_s, timing.compute_s, timing.codec_s)
            self._sums[timing.node] = [old + new for old, new in zip(sums, added, strict=True)]

    def views(self) -> tuple[StageShare, ...]:
        return tuple(
            StageShare(node=node, steps=int(steps), queue_s=queue_s, compute_s=compute_s, codec_s=codec_s)
            for node, (steps, queue_s, compute_s, codec_s) in list(self._sums.items())
        )


class RequestLog:
    """All that run and the last `size` that ended. Methods may be called from any thread."""

    def __init__(
        self,
        size: int = 1000,
        *,
        stage_times: StageTimes = lambda chain: (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.wall_clock = wall_clock
        self.stage_times = stage_times
        self.usage = UsageCounter(wall_clock=wall_clock)
        self._lock = threading.Lock()
        self._opened = 0
        self._closed = 0
        self._live: dict[int, RequestEntry] = {}
        self._ended: deque[RequestEntry] = deque()
        self._size = size
        self._ids: set[str] = set()
        self._listeners: list[Callable[[RequestView], None]] = [_log_end]
        self._counts: deque[tuple[float, int]] = deque()

    def listen(self, listener: Callable[[RequestView], None]) -> None:
        """Call `listener` with every generation that ends, in the thread in which it does."""
        self._listeners.append(listener)

    def open(self, model: str, chain: str, request: GenerationRequest) -> RequestEntry:
        with self._lock:
            self._opened += 1
            entry = RequestEntry(self, self._choose_id(request.request_id), model, chain, request)
            self._ids.add(entry.id)
            self._live[id(entry)] = entry
        return entry

    def close(self, entry: RequestEntry) -> None:
        with self._lock:
            if self._live.pop(id(entry), None) is not None:
                self._closed += 1
                entry.ended_as = self._closed
                self._ended.appendleft(entry)
                while len(self._ended) > self._size:
                    self._ids.discard(self._ended.pop().id)
            else:
                return
        view = entry.view()
        for listener in self._listeners:
            listener(view)

    def count(self, tokens: int, now_s: float) -> None:
        with self._lock:
            self._counts.append((now_s, tokens))
            self._forget(now_s)

    def tokens_per_s(self) -> float:
        """Over the last seconds, all generations together."""
        with self._lock:
            self._forget(self.clock())
            return sum(tokens for _, tokens in self._counts) / _RATE_WINDOW_S

    def views(self, after: int = 0) -> tuple[RequestView, ...]:
        """Those that run, newest first, then those that ended, the last one first; without the first `after`."""
        return self.look(after)[0]

    def look(self, after: int = 0) -> tuple[tuple[RequestView, ...], int]:
        """`views`, and how many have ended so far: whoever asks again after these is told nothing twice."""
        with self._lock:
            entries = [*reversed(self._live.values())]
            entries += itertools.takewhile(lambda entry: entry.ended_as > after, self._ended)
            closed = self._closed
        return tuple(entry.view() for entry in entries), closed

    def _choose_id(self, request_id: str) -> str:
        """The HTTP request's own; its further generations, and requests of the same id, get a number after it."""
        given = request_id or str(self._opened)
        others = (f"{given}.{number}" for number in itertools.count(2))
        return next(id for id in itertools.chain((given,), others) if id not in self._ids)

    def _forget(self, now_s: float) -> None:
        while self._counts and self._counts[0][0] <= now_s - _RATE_WINDOW_S:
            self._counts.popleft()


def _log_end(view: RequestView) -> None:
    log.info(
        "request %s ended (%s) after %.3f s: %d prompt tokens (%d cached), %d generated%s",
        view.id,
        view.finish or view.state,
        view.elapsed_s,
        view.prompt_tokens,
        view.cached_tokens,
        view.generated_tokens,
        f"; {view.error}" if view.error else "",
        extra={"request": view.id, "session": view.session or None, "chain": view.chain},
    )
