"""Concurrent generations of one request, run side by side.

`async with Generations(...)` starts them; `next` hands out deltas in order of arrival; leaving the block, for
whatever reason, closes every iterator of the service, which cancels what is still running.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import Literal, Self

from starlette.requests import Request

from shardcompute.api.context import caller_of, context_of, request_id_of
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.generation.resumption import AnswerPlace, cut_at
from shardcompute.api.generation.structured import check_complete
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.core.errors import BackendError, CancelledError
from shardcompute.core.generation import Delta, GenerationRequest, Interruption, Timings, TokenChoice
from shardcompute.node.service import Service

_QUEUED_DELTAS = 2
"""Of each generation. What comes while these wait to be sent becomes one delta, further down."""


@dataclass(slots=True)
class Outcome:
    """What one generation has given so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[TokenChoice] = field(default_factory=list)
    prompt: tuple[TokenChoice, ...] = ()
    finish: Literal["stop", "length"] | None = None
    timings: Timings | None = None
    interruptions: list[Interruption] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.prompt = self.prompt or delta.prompt
        self.timings = delta.timings or self.timings
        if delta.interruption is not None:
            self.interruptions.append(delta.interruption)
        if delta.finish == "cancelled":
            raise CancelledError("The server cancelled this generation.", hint="send the request again")
        self.finish = delta.finish


class Idle(Enum):
    """No delta came in the time given."""

    IDLE = "idle"


class DeltaQueue:
    """Deltas of several generations on their way to one response. As an `asyncio.Queue` with a time-out, for which no
    timer is set with every delta: there are thousands of them a second."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Delta | Exception]] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._putters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since_s = 0.0

    async def put(self, index: int, item: Delta | Exception) -> None:
        while len(self._items) >= self._most:
            room = self._loop.create_future()
            self._putters.append(room)
            await room
        self._items.append((index, item))
        _wake(self._taker)

    async def get(self, timeout_s: float | None = None) -> tuple[int, Delta | Exception] | None:
        """The next one; None where none came in time. One taker at a time."""
        if not self._items:
            await self._wait(timeout_s)
        if not self._items:
            return None
        item = self._items.popleft()
        while self._putters and len(self._items) < self._most:
            putter = self._putters.popleft()
            if not putter.done():
                putter.set_result(None)
                break
        return item

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _wait(self, timeout_s: float | None) -> None:
        """Until something is there, or time is up."""
        self._taker = self._loop.create_future()
        if timeout_s is not None:
            self._waits_since_s = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(timeout_s, self._look, timeout_s)
        try:
            await self._taker
        finally:
            self._taker = None

    def _look(self, timeout_s: float) -> None:
        """A timer lasts for many deltas: it is set anew for as long as the newest wait has left."""
        self._timer = None
        if self._taker is None:
            return
        left_s = self._waits_since_s + timeout_s - self._loop.time()
        if left_s > 0.001:
            self._timer = self._loop.call_later(left_s, self._look, timeout_s)
        else:
            _wake(self._taker)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Generations:
    """Runs the requests of a plan; `outcomes` holds what each has given so far, in the plan's order."""

    def __init__(
        self,
        service: Service,
        plan: Plan,
        metrics: GenerationMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        cut: AnswerPlace | None = None,
    ) -> None:
        """No delta passes the place `cut`, where a stream that is resumed goes on."""
        self.plan = plan
        self._cut = cut
        self.outcomes = [Outcome() for _ in plan.requests]
        self._service = service
        self._metrics = metrics
        self._clock = clock
        self._queue = DeltaQueue(_QUEUED_DELTAS * len(plan.requests))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for index, request in enumerate(self.plan.requests):
            self._tasks.append(asyncio.create_task(self._pump(index, request)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        self._queue.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, timeout_s: float | None = None) -> tuple[int, Delta] | Idle | None:
        """The next delta and whose it is, None after the last; raises what the service raised."""
        if all(outcome.finish for outcome in self.outcomes):
            return None
        came = await self._queue.get(timeout_s)
        if came is None:
            return Idle.IDLE
        index, item = came
        if isinstance(item, Exception):
            raise item
        self.outcomes[index].add(item)
        return index, item

    async def finish(self) -> list[Outcome]:
        """Waits for all of them."""
        while await self.next() is not None:
            pass
        return self.outcomes

    async def _pump(self, index: int, request: GenerationRequest) -> None:
        """Carries one generation's deltas, or the error that ended it, into the queue."""
        timer = self._metrics.time(self.plan.model.name, self._clock)
        ended_by = "cancelled"
        try:
            deltas = self._service.generate(self.plan.model.name, request)
            try:
                said: list[int] = []
                place = AnswerPlace()
                async for delta in deltas:
                    timer.saw(delta)
                    said += [choice.id for choice in delta.tokens]
                    if delta.finish == "stop" and request.sampling.grammar is not None:
                        await check_complete(self.plan.codec, request.sampling.grammar, said)
                    if self._cut is None:
                        await self._queue.put(index, delta)
                    else:
                        for piece in cut_at(delta, place, self._cut):
                            await self._queue.put(index, piece)
                        place = place.after(delta)
                    if delta.finish is not None:
                        ended_by = delta.finish
                        return
                raise BackendError("A generation ended without a reason.", hint="report this as a bug")
            finally:
                await _close(deltas)
        except Exception as error:
            ended_by = "error"
            await self._queue.put(index, error)
        finally:
            timer.ended(ended_by, prompt_tokens=len(request.prompt))


def open_generations(request: Request, plan: Plan, cut: AnswerPlace | None = None) -> Generations:
    """The generations of a plan, in the name of the HTTP request that asks for them."""
    context = context_of(request)
    caller, request_id = caller_of(request).key_id, request_id_of(request)
    requests = tuple(replace(each, caller=caller, request_id=request_id) for each in plan.requests)
    return Generations(
        context.service, replace(plan, requests=requests), context.metrics, clock=context.clock, cut=cut
    )


async def _close(deltas: AsyncIterator[Delta]) -> None:
    close = getattr(deltas, "aclose", None)
    if close is not None:
        await close()
