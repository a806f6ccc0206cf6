"""Server-sent events: generations streamed to a client until they end, fail, or the client leaves.

Nothing is sent until the first delta or the first silence of `ping_interval_s`, so that errors known by then
are plain HTTP errors. Later ones become one last event. How events are written down is a dialect's `Framing`;
OpenAI's is `data: {…}`, `data: {"error": …}`, and `data: [DONE]` at the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardcompute.api.errors import error_body, status_of
from shardcompute.api.generation.generations import Generations, Outcome, Quiet
from shardcompute.api.generation.replies import ReplyBody
from shardcompute.core.generation import Delta

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class Dialect(Protocol):
    """How one API words an answer, in pieces or as a whole."""

    def chunks(self, index: int, delta: Delta, outcomes: list[Outcome]) -> Iterable[ReplyBody]: ...

    def closing(self, outcomes: list[Outcome]) -> Iterable[ReplyBody]: ...

    def whole(self, outcomes: list[Outcome]) -> ReplyBody: ...


class Framing(Protocol):
    """How one API writes the pieces of a stream down."""

    media_type: str
    ping: bytes
    """What shows that a silent stream lives."""
    ending: bytes

    def write(self, chunk: ReplyBody) -> bytes: ...

    def write_error(self, error: Exception, request_id: str) -> bytes: ...


class PlainEvents:
    """OpenAI's events without names, as of completions and chat."""

    media_type = "text/event-stream"
    ping = b": ping\n\n"
    ending = b"data: [DONE]\n\n"

    def write(self, chunk: ReplyBody) -> bytes:
        return event(chunk.to_json())

    def write_error(self, error: Exception, request_id: str) -> bytes:
        return event(json.dumps(error_body(error, request_id=request_id)).encode())


class EventStream(Response):
    """A response that runs the generations while it sends them."""

    def __init__(
        self,
        generations: Generations,
        dialect: Dialect,
        *,
        ping_interval_s: float,
        request_id: str,
        framing: Framing | None = None,
    ) -> None:
        self._framing = framing or PlainEvents()
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type=self._framing.media_type,
        )
        del self.headers["content-length"]
        self._generations = generations
        self._dialect = dialect
        self._ping_interval_s = ping_interval_s
        self._request_id = request_id
        self._is_open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        framing = self._framing
        async with self._generations as running:
            try:
                while (item := await running.next(self._ping_interval_s)) is not None:
                    if isinstance(item, Quiet):
                        await self._write(send, framing.ping)
                        continue
                    for chunk in self._dialect.chunks(*item, running.outcomes):
                        await self._write(send, framing.write(chunk))
                for chunk in self._dialect.closing(running.outcomes):
                    await self._write(send, framing.write(chunk))
                await self._write(send, framing.ending)
            except Exception as error:
                if not self._is_open:
                    raise
                self._log_failure(error)
                await self._write(send, framing.write_error(error, self._request_id))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        if not data:
            return
        if not self._is_open:
            self._is_open = True
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    def _log_failure(self, error: Exception) -> None:
        if status_of(error) >= 500:
            _log.error("request %s failed while streaming", self._request_id, exc_info=error)


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs `work`, cancelling it and raising ClientDisconnect as soon as the client has left."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _stop(task, watcher)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    stopped: Awaitable[Any] = asyncio.gather(*tasks, return_exceptions=True)
    await stopped
