"""Concurrent generations of one request, run side by side.

`async with Generations(...)` starts them; `next` hands out deltas in order of arrival; leaving the block, for
whatever reason, closes every iterator of the service, which cancels what is still running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import Literal, Self

from starlette.requests import Request

from shardcompute.api.context import caller_of, context_of, request_id_of
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.generation.structured import check_complete
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.core.errors import BackendError, CancelledError
from shardcompute.core.generation import Delta, GenerationRequest, Interruption, Timings, TokenChoice
from shardcompute.node.service import Service

_QUEUED_DELTAS = 256


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


class Generations:
    """Runs the requests of a plan; `outcomes` holds what each has given so far, in the plan's order."""

    def __init__(
        self,
        service: Service,
        plan: Plan,
        metrics: GenerationMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.outcomes = [Outcome() for _ in plan.requests]
        self._service = service
        self._metrics = metrics
        self._clock = clock
        self._queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(_QUEUED_DELTAS)
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
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, timeout_s: float | None = None) -> tuple[int, Delta] | Idle | None:
        """The next delta and whose it is, None after the last; raises what the service raised."""
        if all(outcome.finish for outcome in self.outcomes):
            return None
        try:
            async with asyncio.timeout(timeout_s):
                index, item = await self._queue.get()
        except TimeoutError:
            return Idle.IDLE
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
                async for delta in deltas:
                    timer.saw(delta)
                    said += [choice.id for choice in delta.tokens]
                    if delta.finish == "stop" and request.sampling.grammar is not None:
                        await check_complete(self.plan.codec, request.sampling.grammar, said)
                    await self._queue.put((index, delta))
                    if delta.finish is not None:
                        ended_by = delta.finish
                        return
                raise BackendError("A generation ended without a reason.", hint="report this as a bug")
            finally:
                await _close(deltas)
        except Exception as error:
            ended_by = "error"
            await self._queue.put((index, error))
        finally:
            timer.ended(ended_by, prompt_tokens=len(request.prompt))


def open_generations(request: Request, plan: Plan) -> Generations:
    """The generations of a plan, in the name of the HTTP request that asks for them."""
    context = context_of(request)
    caller, request_id = caller_of(request).key_id, request_id_of(request)
    requests = tuple(replace(each, caller=caller, request_id=request_id) for each in plan.requests)
    return Generations(
        context.service, replace(plan, requests=requests), context.metrics, clock=context.clock
    )


async def _close(deltas: AsyncIterator[Delta]) -> None:
    close = getattr(deltas, "aclose", None)
    if close is not None:
        await close()
