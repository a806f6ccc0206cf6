"""SSE stream of a cluster's changes: `state` first, then `change`s; `state` again for a slow reader.

What is kept for one reader is bounded (see `node.admin.feed`), so whoever stops reading costs nothing but a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardcompute.api.sse import HEADERS, MEDIA_TYPE, PING, event, until_disconnect
from shardcompute.node.admin.views import ClusterView

if TYPE_CHECKING:
    from shardcompute.node.admin.admin import ClusterAdmin
    from shardcompute.node.admin.feed import News, Subscription


class ClusterEventStream(Response):
    """A response that goes on until the client leaves."""

    media_type = MEDIA_TYPE

    def __init__(self, admin: ClusterAdmin, *, ping_interval_s: float) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._admin = admin
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The loop may have ended before the reader could say that it left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(woken.set)

        # Where there is no place for another reader, this is a plain HTTP error.
        reader = self._admin.subscribe(wake)
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            while True:
                await self._tell(send, reader)
                await self._wait(send, woken)
        finally:
            self._admin.unsubscribe(reader)

    async def _tell(self, send: Send, reader: Subscription) -> None:
        for news in reader.take():
            await send({"type": "http.response.body", "body": encode_event(news), "more_body": True})

    async def _wait(self, send: Send, woken: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(woken.wait(), self._ping_interval_s)
        except TimeoutError:
            await send({"type": "http.response.body", "body": PING, "more_body": True})
        woken.clear()


def encode_event(news: News) -> bytes:
    return event(msgspec.json.encode(news), "state" if isinstance(news, ClusterView) else "change")
