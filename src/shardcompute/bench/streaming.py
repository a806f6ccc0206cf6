"""Streamed answers as a client takes them: chunks of one response, and several requests at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from shardcompute.core.errors import BackendError

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


def check_answered(response: httpx.Response) -> None:
    """BackendError with what the server says, unless it answers."""
    if response.status_code != 200:
        raise BackendError(f"status {response.status_code}: {response.read().decode()[:300]}")


def chunks_of(
    response: httpx.Response, on_ping: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer; `on_ping` hears of signs of life between them. BackendError if it fails."""
    check_answered(response)
    for line in response.iter_lines():
        if line.startswith(":"):
            on_ping()
        if not line.startswith("data: {"):
            continue
        chunk: dict[str, Any] = json.loads(line[6:])
        if "error" in chunk:
            raise BackendError(f"the stream failed: {chunk['error']}")
        yield chunk


def ask_at_once(asked: Sequence[Asked], ask: Callable[[Asked], Answered]) -> tuple[list[Answered], float]:
    """All answers, and how long they took together; all have ended when the first failure is raised."""
    started = time.perf_counter()
    with ThreadPoolExecutor(max_workers=len(asked)) as pool:
        answers = [pool.submit(ask, each) for each in asked]
    return [answer.result() for answer in answers], time.perf_counter() - started
