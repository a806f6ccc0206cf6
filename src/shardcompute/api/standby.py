"""ASGI application of a coordinator that waits to lead: every request is told who does, with a 503.

503 and no redirect: load balancers take a server out for it, OpenAI's clients try again after `retry-after`, and what
follows redirects leaves the API key behind where they lead to another host. Only the page is redirected: a person
follows, without a key.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from shardcompute.api.access.hosts import LOOPBACK_ONLY, AllowedHosts, HostMiddleware
from shardcompute.api.body import json_response
from shardcompute.api.context import request_id_of
from shardcompute.api.endpoints import HealthReply, LeaderReply
from shardcompute.api.errors import error_response
from shardcompute.api.metrics.collector import GenerationMetrics
from shardcompute.api.middleware import RequestIdMiddleware
from shardcompute.core.errors import NotLeadingError
from shardcompute.node.coordinator.shared import Standing

LEADER_HEADER = "x-shardcompute-leader"
RETRY_AFTER_S = 2
"""As long as a leader's lease: before that nobody else can lead."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def create_standby_app(standing: Callable[[], Standing], *, hosts: AllowedHosts = LOOPBACK_ONLY) -> Starlette:
    """`standing` says how things are at the moment; it may not wait. `hosts` are the names that the server goes by."""

    async def answer(request: Request) -> Response:
        now = standing()
        url = "" if now.leader is None else now.leader.api_url
        path = request.url.path
        if path == "/" and url and request.method in ("GET", "HEAD"):
            return RedirectResponse(f"{url}/", status_code=307)
        if path == "/health":
            response = json_response(_health(now), 503)
        else:
            response = error_response(_refusal(now), request_id=request_id_of(request), path=path)
        response.headers["retry-after"] = str(RETRY_AFTER_S)
        if url:
            response.headers[LEADER_HEADER] = url
        return response

    return Starlette(
        routes=[Route("/{path:path}", answer, methods=list(_METHODS))],
        middleware=[
            Middleware(RequestIdMiddleware, metrics=GenerationMetrics(), known_paths=frozenset()),
            Middleware(HostMiddleware, allowed=hosts),
        ],
    )


def _health(now: Standing) -> HealthReply:
    leader = now.leader
    if leader is None:
        return HealthReply(status="waiting", reason=_refusal(now).message)
    return HealthReply(
        status="waiting",
        reason=_refusal(now).message,
        leader=LeaderReply(node=leader.node, url=leader.api_url or None, since_s=leader.since_s),
    )


def _refusal(now: Standing) -> NotLeadingError:
    if now.problem:
        return NotLeadingError(
            f"This coordinator waits to lead, and who does is not known: {now.problem}.",
            hint="ask a driver or another coordinator; try again later",
        )
    if now.leader is None:
        return NotLeadingError("No coordinator leads this cluster yet.", hint="try again in a few seconds")
    where = f", at {now.leader.api_url}" if now.leader.api_url else ""
    return NotLeadingError(
        f"This coordinator waits to lead: {now.leader.node} does{where}.",
        hint="ask that one, or a driver; this one answers when it has taken over",
    )
