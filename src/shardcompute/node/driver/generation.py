"""Generation, from picked tokens to deltas: its text, how its frames spent their time, and who hears of it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardcompute.core.errors import ShardComputeError
from shardcompute.core.generation import (
    Delta,
    FinishReason,
    GenerationRequest,
    Interruption,
    Timings,
    TokenChoice,
    Traversal,
)
from shardcompute.core.steps import Frame
from shardcompute.decoding import StopMatcher
from shardcompute.models.detokenizer import StreamingDetokenizer
from shardcompute.node.driver.receipts.record import AnswerRecord
from shardcompute.node.driver.sessions.session import Session
from shardcompute.node.driver.speculator import DraftStats
from shardcompute.node.rpc.commands import UNCHANGED, ShapeChange
from shardcompute.wire import StageTiming

if TYPE_CHECKING:
    import asyncio

    from shardcompute.models.tokenizer import Tokenizer

Emit = Callable[[Delta | ShardComputeError], None]


class GenerationText:
    """One generation's text so far. `push` is given tokens in order until `finish` is set."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = StreamingDetokenizer(tokenizer, shown_ids=request.shown_ids)
        self._stops = StopMatcher(request.stop, request.include_stop) if request.stop else None
        self.count = 0
        self.finish: FinishReason | None = None

    def push(self, choice: TokenChoice) -> Delta:
        self.count += 1
        if choice.id in self._request.stop_ids:
            self.finish = "stop"
            return Delta(self._flush(), (choice,), finish=self.finish)
        text = self._detokenizer.push(choice.id)
        if self._stops is not None:
            result = self._stops.push(text)
            text = result.text
            if result.matched:
                self.finish = "stop"
        if self.finish is None and self.count >= self._request.max_tokens:
            self.finish = "length"
            text += self._flush()
        return Delta(text, (choice,), finish=self.finish)

    def _flush(self) -> str:
        """What was held back: an unfinished character, a possible stop string that never completed."""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return rest
        result = self._stops.push(rest)
        if result.matched:
            self.finish = "stop"
            return result.text
        return result.text + self._stops.finish()


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


@dataclass(slots=True)
class Generation:
    """What the driver keeps beside the scheduler's session: its text, who hears of it, and its times."""

    session: Session
    answer: GenerationText
    emit: Emit
    submitted_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    record: AnswerRecord | None = None
    """Of an answer that is to have a receipt."""
    is_cancelled: bool = False
    """Nobody wants to hear of it any more."""
    journey: Journey = field(default_factory=Journey)
    change: ShapeChange | None = None
    """The chain was lost under it, and is another one since the last token."""
    last_token_s: float = 0.0
    prefill_pause_s: float = 0.0
    decode_pause_s: float = 0.0

    def interrupt(self, change: ShapeChange) -> None:
        """Its chain is another one. Before it was begun on the former, that is nothing to it."""
        if self.started_s == 0 and not self.answer.count:
            return
        former = self.change or UNCHANGED
        lost = tuple(dict.fromkeys((*former.lost, *change.lost)))
        self.change = ShapeChange(lost, change.taken_over_by)

    def resumed(self, now: float) -> Interruption | None:
        """There is another token: what had to be waited for before it, if anything."""
        change, before = self.change, self.last_token_s or self.started_s
        self.change, self.last_token_s = None, now
        if change is None:
            return None
        pause_s = max(now - before, 0.0)
        if self.answer.count:
            self.decode_pause_s += pause_s
        else:
            self.prefill_pause_s += pause_s
        return Interruption(change.lost, change.taken_over_by, pause_s, self.answer.count)

    def timings(self, stats: DraftStats, now: float) -> Timings:
        """How its time was spent, now that it is over."""
        return Timings(
            queue_s=self.started_s - self.submitted_s,
            prefill_s=self.first_token_s - self.started_s - self.prefill_pause_s,
            decode_s=now - self.first_token_s - self.decode_pause_s,
            prompt_tokens=self.session.prompt_length,
            generated_tokens=self.answer.count,
            cached_tokens=self.session.reused,
            traversals=self.journey.traversals,
            drafted_tokens=sum(stats.drafted),
            accepted_tokens=sum(stats.accepted),
            drafted_by_position=tuple(stats.drafted),
            accepted_by_position=tuple(stats.accepted),
            traversal=self.journey.mean(stats.draft_s),
            interrupted_s=self.prefill_pause_s + self.decode_pause_s,
        )


class _LoopBell:
    """Wakes the streams of one event loop: however many deltas a frame brings, the loop is rung once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._due: list[DeltaStream] = []

    def ring(self, stream: DeltaStream) -> None:
        """From any thread."""
        with self._lock:
            self._due.append(stream)
            if len(self._due) > 1:
                return
        # A loop that was closed has nobody waiting; the threads that emit must go on for the others.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for stream in due:
            stream.wake()


_bells: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopBell] = WeakKeyDictionary()


class DeltaStream:
    """Deltas from a driver's threads, for the event loop in which this was made. Iterating ends after the last one,
    or with the error that ended the generation. A loop that lags gets what has come meanwhile as one delta."""

    def __init__(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        self._loop = loop
        self._bell = _bells.setdefault(loop, _LoopBell(loop))
        self._said: deque[Delta | ShardComputeError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False

    def emit(self, said: Delta | ShardComputeError) -> None:
        """From any thread, one at a time."""
        self._said.append(said)
        # Looked at after it was put there: whoever took what was before it may be waiting again.
        if len(self._said) == 1:
            self._bell.ring(self)

    def wake(self) -> None:
        """In the loop: there is something."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_over:
            raise StopAsyncIteration
        while not self._said:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        said = self._said.popleft()
        if isinstance(said, ShardComputeError):
            raise said
        if self._said:
            said = self._with_following(said)
        self._is_over = said.finish is not None
        return said

    def _with_following(self, first: Delta) -> Delta:
        """All that is there, up to an error or what had to be waited for, as one delta."""
        texts, tokens, last = [first.text], [*first.tokens], first
        while self._said:
            following = self._said[0]
            if isinstance(following, ShardComputeError) or following.interruption is not None:
                break
            self._said.popleft()
            texts.append(following.text)
            tokens += following.tokens
            last = following
        return Delta(
            "".join(texts), tuple(tokens), first.prompt, last.finish, last.timings, first.interruption
        )
