"""Operational endpoints, of no protocol: health, version, metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import ReplyBody, json_response
from shardcompute.api.context import context_of, package_version
from shardcompute.api.errors import RETRY_AFTER_S
from shardcompute.api.metrics.collector import CONTENT_TYPE
from shardcompute.api.openapi import ApiRoute

if TYPE_CHECKING:
    from shardcompute.node.admin.admin import ClusterAdmin


class LeaderReply(ReplyBody):
    """The coordinator that leads, in place of the one that was asked."""

    node: str
    url: str | None = None
    """Where its API is, where that is known."""
    since_s: float
    """When it began, in seconds since 1970."""


class HealthReply(ReplyBody):
    status: Literal["ok", "loading", "waiting"]
    reason: str | None = None
    leader: LeaderReply | None = None
    """Of a coordinator that waits to lead: who does."""
    warnings: list[str] | None = None
    """What the operator should see to; requests are answered all the same."""


class VersionReply(ReplyBody):
    version: str


async def health(request: Request) -> Response:
    admin: ClusterAdmin | None = request.app.state.admin
    warnings = list(admin.warnings()) if admin is not None else []
    said: dict[str, Any] = {"warnings": warnings} if warnings else {}
    obstacle = context_of(request).service.obstacle()
    if obstacle is None:
        return json_response(HealthReply(status="ok", **said))
    response = json_response(HealthReply(status="loading", reason=str(obstacle), **said), 503)
    response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


async def version(request: Request) -> Response:
    return json_response(VersionReply(version=package_version()))


async def metrics(request: Request) -> Response:
    context = context_of(request)
    admin: ClusterAdmin | None = request.app.state.admin
    cluster = None if admin is None else await asyncio.to_thread(admin.health)
    snapshot = context.metrics.snapshot(context.service, cluster)
    # Many series take milliseconds to write, in which tokens would have to wait.
    return Response(await asyncio.to_thread(snapshot.render), headers={"content-type": CONTENT_TYPE})


OPERATIONAL_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET",
        "/health",
        health,
        "200 once a model is loaded.",
        needs=Access.OPEN,
        reply=HealthReply,
        statuses=(503,),
    ),
    ApiRoute("GET", "/version", version, "The version of the server.", needs=Access.USE, reply=VersionReply),
    ApiRoute("GET", "/metrics", metrics, "Metrics in Prometheus' text form.", needs=Access.OBSERVE),
)
