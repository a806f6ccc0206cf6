"""Streaming and whole answers: runs the generations of a plan and lets a protocol's adapter word them.

Nothing is sent until the first delta or the first silence of `ping_interval_s`, so that errors known by then
are plain HTTP errors. Later ones become one last event. How chunks are written down is the protocol's `Framing`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardcompute.api.body import AnyReply, ReplyBody, json_response
from shardcompute.api.context import context_of, request_id_of
from shardcompute.api.errors import status_of
from shardcompute.api.generation.generations import Generations, Idle, Outcome, open_generations
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.generation.receipts import name_receipts, with_receipts
from shardcompute.api.generation.resumption import AnswerPlace, StreamResumption, with_seed
from shardcompute.api.sse import HEADERS, until_disconnect
from shardcompute.core.generation import Delta

UNENFORCED_HEADER = "x-shardcompute-unenforced-tools"
_NAMES_SHOWN = 16
_SIGN_TOKENS = 32
"""After so many tokens that a client has already it is shown that its stream lives."""
_log = logging.getLogger(__name__)


class ReplyAdapter(Protocol):
    """How one API words an answer, in chunks or as a whole."""

    def chunks(self, index: int, delta: Delta, outcomes: list[Outcome]) -> Iterable[AnyReply]: ...

    def closing(self, outcomes: list[Outcome]) -> Iterable[AnyReply]: ...

    def whole(self, outcomes: list[Outcome]) -> ReplyBody: ...


class Framing(Protocol):
    """How one API writes the chunks of a stream down."""

    media_type: str
    ping: bytes
    """What shows that a silent stream lives."""
    ending: bytes

    def write(self, chunk: AnyReply) -> bytes: ...

    def write_error(self, error: Exception, request_id: str) -> bytes: ...


async def answer(
    request: Request,
    plan: Plan,
    adapter: ReplyAdapter,
    framing: Framing,
    *,
    is_stream: bool,
    resumption: StreamResumption | None = None,
) -> Response:
    """The plan's generations as one response: streamed, or whole once all have ended. With a `resumption` the stream's
    events have ids, and those that the client has are left out."""
    context = context_of(request)
    plan = with_receipts(request, plan)
    if is_stream:
        plan = with_seed(plan, resumption)
        generations = open_generations(request, plan, None if resumption is None else resumption.place)
        stream = GenerationStream(
            generations,
            adapter,
            framing,
            ping_interval_s=context.limits.ping_interval_s,
            request_id=request_id_of(request),
            resumption=resumption,
        )
        return _with_notice(stream, plan)
    generations = open_generations(request, plan)
    outcomes = await until_disconnect(request.receive, _finish(generations))
    return _with_notice(json_response(adapter.whole(outcomes)), plan)


def _with_notice(response: Response, plan: Plan) -> Response:
    """Says which tools the calls of this answer may not wholly fit, and under which ids its receipts will be."""
    if plan.unenforced:
        more = len(plan.unenforced) - _NAMES_SHOWN
        names = ", ".join(plan.unenforced[:_NAMES_SHOWN]) + (f", and {more} more" if more > 0 else "")
        response.headers[UNENFORCED_HEADER] = names
    name_receipts(response, plan)
    return response


class GenerationStream(Response):
    """A response that runs the generations while it sends them."""

    def __init__(
        self,
        generations: Generations,
        adapter: ReplyAdapter,
        framing: Framing,
        *,
        ping_interval_s: float,
        request_id: str,
        resumption: StreamResumption | None = None,
    ) -> None:
        super().__init__(headers=HEADERS, media_type=framing.media_type)
        del self.headers["content-length"]
        self._generations = generations
        self._adapter, self._framing = adapter, framing
        self._ping_interval_s = ping_interval_s
        self._request_id = request_id
        self._resumption = resumption
        self._place = AnswerPlace()
        self._is_open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        framing = self._framing
        async with self._generations as running:
            try:
                while (item := await running.next(self._ping_interval_s)) is not None:
                    if item is Idle.IDLE:
                        await self._write(send, framing.ping)
                        continue
                    written = (framing.write(each) for each in self._adapter.chunks(*item, running.outcomes))
                    if self._resumption is None:
                        for data in written:
                            await self._write(send, data)
                    else:
                        await self._write_numbered(send, item[1], list(written), self._resumption)
                for chunk in self._adapter.closing(running.outcomes):
                    await self._write(send, framing.write(chunk))
                await self._write(send, framing.ending)
            except Exception as error:
                if not self._is_open:
                    raise
                self._log_failure(error)
                await self._write(send, framing.write_error(error, self._request_id))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_numbered(
        self, send: Send, delta: Delta, written: list[bytes], resumption: StreamResumption
    ) -> None:
        """The last event of a delta has the id of where that ends; what the client has is left out."""
        former, self._place = self._place, self._place.after(delta)
        if self._place.is_covered_by(resumption.place):
            if former.tokens // _SIGN_TOKENS != self._place.tokens // _SIGN_TOKENS:
                await self._write(send, self._framing.ping)
            return
        for number, data in enumerate(written, 1):
            mark = f"id: {resumption.id_at(self._place)}\n".encode() if number == len(written) else b""
            await self._write(send, mark + data)

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
            _log.error(
                "request %s failed while streaming",
                self._request_id,
                exc_info=error,
                extra={"request": self._request_id},
            )


async def _finish(generations: Generations) -> list[Outcome]:
    async with generations as running:
        return await running.finish()
