"""Server-sent events: how one is written, the stream's headers, and work that ends when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

MEDIA_TYPE = "text/event-stream"
PING = b": ping\n\n"
"""A comment: it shows that a silent stream lives."""
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
Result = TypeVar("Result")


def event(data: bytes, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


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
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
