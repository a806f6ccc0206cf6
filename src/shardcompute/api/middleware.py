"""Outermost ASGI middleware: every response has an id, every request is counted, no exception escapes.

An exception that nobody foresaw is logged once, under the id that the client is told.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardcompute.api.errors import error_response
from shardcompute.api.metrics.collector import GenerationMetrics

CLIENT_LEFT_STATUS = 499
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_log = logging.getLogger(__name__)


def new_request_id() -> str:
    return uuid.uuid4().hex


class RequestIdMiddleware:
    """Keeps a client's own `x-request-id` where it is harmless, and makes one otherwise."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: GenerationMetrics,
        known_paths: frozenset[str],
        new_id: Callable[[], str] = new_request_id,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._known_paths = known_paths
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _CLIENT_ID.fullmatch(given) else self._new_id()
        scope["shardcompute.request_id"] = request_id
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_LEFT_STATUS
            _log.debug("request %s: the client left", request_id, extra={"request": request_id})
        except Exception as error:
            _log.exception(
                "request %s failed: %s %s",
                request_id,
                scope["method"],
                scope["path"],
                extra={"request": request_id},
            )
            if status is None:
                response = error_response(error, request_id=request_id, path=scope["path"])
                await response(scope, receive, send_with_id)
        finally:
            self._count(scope, status)

    def _count(self, scope: Scope, status: int | None) -> None:
        """Only paths and methods that we know become labels, so that nobody can fill our memory with them."""
        path = scope["path"] if scope["path"] in self._known_paths else "other"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http_requests.labels(path, method, str(status or CLIENT_LEFT_STATUS)).inc()
