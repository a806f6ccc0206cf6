"""HTTP connection limits: bounds on what a slow, silent or confused client may hold of the server.

uvicorn waits as long as it takes for a request to come and for an answer to be read. Here the head of a request
has `head_timeout_s`, and a client that stops reading has `write_timeout_s`. Beyond `most_connections` the one that
has been silent longest must go. What clients do wrong is logged once in a while, not once for each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import select
import sys
from dataclasses import dataclass, field
from typing import Any

import h11
import psutil
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from shardcompute.api.errors import error_response
from shardcompute.api.request_heads import StrictHeads
from shardcompute.core.errors import CapacityError
from shardcompute.core.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)
_LEAST_CONNECTIONS = 4
_FEW_CONNECTIONS = 64
_MOST_CONNECTIONS = 4096
_RESERVED = 4
"""Connections beyond the most, for asking how the server is."""
_KEPT_FILES = 16
"""For logs, the journal, links of the cluster and whatever else is opened meanwhile."""


def choose_most_connections() -> int:
    """Half of the files that this process may still open: the cluster needs some too. Where they are few, the limit is
    raised as far as the system allows, and what comes of it is said."""
    soft = _raised_files_limit(2 * _MOST_CONNECTIONS + _KEPT_FILES)
    if soft < 0:
        return _MOST_CONNECTIONS
    free = int(soft - psutil.Process().num_fds() - _KEPT_FILES)
    chosen = max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, free // 2))
    if chosen < _FEW_CONNECTIONS:
        _log.warning(
            "only %d connections to the API at once: this process may open %d files (ulimit -n)", chosen, soft
        )
    return chosen


def _raised_files_limit(wanted: int) -> int:
    """How many files this process may open, after asking for `wanted`; -1 where nothing limits that (Windows)."""
    if sys.platform == "win32":
        return -1
    else:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < wanted:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return soft


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may hold of a server."""

    head_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    most_connections: int = field(default_factory=choose_most_connections)


class BoundedConnection(H11Protocol):
    """One connection of a server, which uvicorn makes of the class alone: `bounded` gives it limits."""

    limits: ConnectionLimits
    limited_log: RateLimitedLog
    uvicorn_log: logging.Logger

    @classmethod
    def bounded(cls, limits: ConnectionLimits) -> type[BoundedConnection]:
        """The class of one server's connections."""
        limited_log = RateLimitedLog(_log)
        # A logger of this server's own, so that filtering it concerns no other.
        uvicorn_log = logging.Logger("uvicorn.error")
        uvicorn_log.parent = logging.getLogger("uvicorn.error")
        uvicorn_log.addFilter(_NoRequests(limited_log))
        fields = {"limits": limits, "limited_log": limited_log, "uvicorn_log": uvicorn_log}
        return type("Connection", (cls,), fields)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = self.uvicorn_log
        self.conn._receive_buffer = StrictHeads()
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def has_unread(self) -> bool:
        """Whether something has come, or the client has gone, since we last looked."""
        if sys.platform == "win32":
            return False
        else:
            number = self.transport.get_extra_info("socket").fileno()
            if number < 0:
                return True
            poll = select.poll()
            poll.register(number, select.POLLIN)
            return bool(poll.poll(0))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.most_connections:
            self._make_room()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._head_timer, self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def handle_events(self) -> None:
        super().handle_events()
        cycle = self.cycle
        # Its task was made a moment ago and has not run yet.
        if cycle is not None and not isinstance(cycle.send, PieceSender):
            cycle.send = PieceSender(cycle)  # type: ignore[method-assign]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        # In the middle of an answer there is no way left to say it.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        self.limited_log.info("upgrade", "a client asked for another protocol than HTTP")

    def _watch_head(self) -> None:
        """Between requests a timer runs until the next one's head is whole."""
        if not self.is_between_requests:
            self._stop(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._end_between_requests)

    def _end_between_requests(self) -> None:
        self._head_timer = None
        if self.is_between_requests:
            self.transport.abort()

    def _make_room(self) -> None:
        self.limited_log.warning("most", "more than %d connections to the API", self.limits.most_connections)
        silent = self._longest_silent()
        if silent is None and len(self.connections) <= self.limits.most_connections + _RESERVED:
            self.app = _answer_health_alone(self.app)
            return
        victim = silent or self
        self._stop(victim._head_timer)
        victim._head_timer = None
        victim.transport.abort()

    def _longest_silent(self) -> BoundedConnection | None:
        idle = [
            (each._head_timer.when(), index, each)
            for index, each in enumerate(self.connections)
            if isinstance(each, BoundedConnection) and each._head_timer is not None
        ]
        heapq.heapify(idle)
        # One whose bytes wait to be read is not silent: it came in the same turn of the loop as whoever needs room.
        while idle and idle[0][2].has_unread:
            heapq.heappop(idle)
        return idle[0][2] if idle else None

    def _stop(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


class PieceSender:
    """Sends a response, as uvicorn does; the pieces of one that is sent in chunks without h11's bookkeeping, which has
    nothing to keep between the head and the end, and costs more than all else that is done for a token."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._is_chunked = False

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if (
            self._is_chunked
            and message["type"] == "http.response.body"
            and message.get("more_body")
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        ):
            if body := message.get("body", b""):
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        await self._send(message)
        if message["type"] == "http.response.start":
            self._is_chunked = self._will_be_chunked(message)

    def _will_be_chunked(self, start: Any) -> bool:
        """As h11 decides it (RFC 9112, 6.3)."""
        scope = self._cycle.scope
        named = {name.lower() for name, _ in start.get("headers", ())}
        return (
            scope["http_version"] == "1.1"
            and scope["method"] != "HEAD"
            and start["status"] == 200
            and not named & {b"content-length", b"transfer-encoding"}
        )


def _answer_health_alone(app: ASGIApp) -> ASGIApp:
    """For connections beyond the limit, where all others are being answered: how the server is can always be asked."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/health":
            await app(scope, receive, send)
            return
        full = CapacityError("All connections to the server are taken.", hint="send the request again later")
        response = error_response(full, path=scope.get("path", ""))
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    return run


class _NoRequests(logging.Filter):
    """Keeps back uvicorn's line for each request that is none."""

    def __init__(self, limited_log: RateLimitedLog) -> None:
        super().__init__()
        self._limited_log = limited_log

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != "Invalid HTTP request received.":
            return True
        self._limited_log.info("invalid", "something that is no HTTP request came to the API")
        return False
