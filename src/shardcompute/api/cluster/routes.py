"""Cluster admin routes: what `node.admin.admin` answers, over HTTP. Mounted where there is a cluster.

Each says which role it is for (see `access.requirement`); `POST /session` alone is for whoever has a code. What does
not exist is a 404. Secrets are in the answer to their creation and in no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.access.sign_in import PageSessions, SignInCode
from shardcompute.api.body import read_body
from shardcompute.api.cluster.events import ClusterEventStream
from shardcompute.api.cluster.schemas import (
    CatalogueList,
    CreateKeyRequest,
    CreateTokenRequest,
    Deleted,
    EmptyRequest,
    KeepLayoutRequest,
    KeyList,
    LoadModelRequest,
    PlanModelRequest,
    PullModelRequest,
    RequestList,
    ServeModelRequest,
    SessionKey,
    SignInRequest,
    TokenList,
)
from shardcompute.api.context import caller_of, context_of, tell_audit
from shardcompute.api.errors import RequestError
from shardcompute.api.openapi import ApiRoute
from shardcompute.control.placement.parallelism import Parallelism, parse_parallelism
from shardcompute.core.errors import UnknownModelError, UsageError
from shardcompute.node.admin.history import HistoryPage
from shardcompute.node.admin.views import (
    ClusterChange,
    ClusterView,
    FetchView,
    ModelView,
    NewKey,
    NewPairing,
    NewToken,
    NodeView,
    PlanView,
    RevokedNode,
)
from shardcompute.node.telemetry.audit import AuditPage
from shardcompute.node.telemetry.history_store import DAY_S, FAR_S, EventView, HistoryRange
from shardcompute.node.telemetry.request_log import RequestView
from shardcompute.node.telemetry.usage import HOUR_S, UsageReport, UsageView
from shardcompute.security.api_keys import KeyLimits, KeyRole
from shardcompute.security.names import Role

if TYPE_CHECKING:
    from shardcompute.node.admin.admin import ClusterAdmin

_ORDER_ERRORS = (400, 403, 404, 413, 415)
_NAMING_ERRORS = (403, 404)
_MOST_DIGITS = 15
_RANGE = ("since", "until", "before", "limit")
_USUAL_ENTRIES = 200
_MOST_ENTRIES = 1000
Result = TypeVar("Result")


async def cluster_state(request: Request) -> Response:
    return _reply(await asyncio.to_thread(_admin(request).state))


async def cluster_events(request: Request) -> Response:
    return ClusterEventStream(_admin(request), ping_interval_s=context_of(request).limits.ping_interval_s)


async def cluster_requests(request: Request) -> Response:
    data, ended = _admin(request).requests_after(_count_of(request, "after"))
    return _reply({"data": data, "ended": ended})


async def cluster_usage(request: Request) -> Response:
    report, caller = _admin(request).usage(), caller_of(request)
    return _reply(report if caller.role.includes(KeyRole.OBSERVE) else report.of_key(caller.key_id))


async def history_events(request: Request) -> Response:
    return _reply(await asyncio.to_thread(_admin(request).history.events, _range_of(request)))


async def history_requests(request: Request) -> Response:
    return _reply(await asyncio.to_thread(_admin(request).history.requests, _range_of(request)))


async def history_usage(request: Request) -> Response:
    span_s = _count_of(request, "span", HOUR_S)
    if span_s not in (HOUR_S, DAY_S):
        raise RequestError(f"span is {HOUR_S} or {DAY_S} seconds.", param="span", code="invalid_value")
    return _reply(await asyncio.to_thread(_admin(request).history.usage, _range_of(request), span_s))


async def audit_log(request: Request) -> Response:
    wanted = _range_of(request)
    page = partial(_admin(request).audit.page, before=wanted.before, limit=wanted.limit)
    return _reply(await asyncio.to_thread(page))


async def cluster_catalogue(request: Request) -> Response:
    return _reply({"data": await asyncio.to_thread(_admin(request).catalogue)})


async def pull_model(request: Request) -> Response:
    order = await read_body(request, PullModelRequest, context_of(request).limits)
    tell_audit(request, order.model)
    return _reply(await asyncio.to_thread(_admin(request).pull_model, order.model))


async def plan_model(request: Request) -> Response:
    order = await read_body(request, PlanModelRequest, context_of(request).limits)
    plan = partial(
        _admin(request).plan,
        kv_type=order.kv_type,
        parallel=_parallelism(order),
        price_per_kwh=order.price_kwh,
        what_if=None if order.what_if is None else order.what_if.machines(),
    )
    return _reply(await asyncio.to_thread(plan, order.model, order.form, order.chains))


async def load_model(request: Request) -> Response:
    order = await read_body(request, ServeModelRequest, context_of(request).limits)
    tell_audit(
        request,
        order.model,
        form=order.form,
        chains=order.chains,
        replace=order.replace or None,
        kv_type=order.kv_type,
        adapters=", ".join(order.adapters or ()) or None,
    )
    load = partial(
        _admin(request).load_model,
        replaces=order.replace,
        via_coordinator=order.via_coordinator,
        kv_type=order.kv_type,
        adapters=order.adapters,
        parallel=_parallelism(order),
    )
    return _reply(await asyncio.to_thread(load, order.model, order.form, order.chains))


def _parallelism(order: LoadModelRequest) -> Parallelism | None:
    return None if order.parallel is None else parse_parallelism(order.parallel)


async def unload_model(request: Request) -> Response:
    return await _delete(request, "model", _admin(request).unload_model)


async def keep_layout(request: Request) -> Response:
    order = await read_body(request, KeepLayoutRequest, context_of(request).limits)
    model = request.path_params["model"]
    tell_audit(request, model, keep=order.keep)
    return _reply(await asyncio.to_thread(_admin(request).keep_layout, model, order.keep))


async def drain_node(request: Request) -> Response:
    await read_body(request, EmptyRequest, context_of(request).limits)
    return _reply(await _find(_admin(request).drain_node, request.path_params["node"]))


async def pardon_node(request: Request) -> Response:
    await read_body(request, EmptyRequest, context_of(request).limits)
    return _reply(await _find(_admin(request).pardon_node, request.path_params["node"]))


async def revoke_node(request: Request) -> Response:
    return _reply(await _find(_admin(request).revoke_node, request.path_params["node"]))


async def create_token(request: Request) -> Response:
    order = await read_body(request, CreateTokenRequest, context_of(request).limits)
    create = partial(
        _admin(request).create_token,
        life_s=float(order.expires_s),
        max_uses=order.max_uses,
        role=None if order.role is None else Role(order.role),
        origin=order.origin,
    )
    made = await asyncio.to_thread(create)
    tell_audit(request, made.id, role=order.role, expires_s=order.expires_s, max_uses=order.max_uses)
    return _reply(made)


async def open_pairing(request: Request) -> Response:
    await read_body(request, EmptyRequest, context_of(request).limits)
    return _reply(await asyncio.to_thread(_admin(request).open_pairing))


async def list_tokens(request: Request) -> Response:
    return _reply({"data": _admin(request).tokens()})


async def revoke_token(request: Request) -> Response:
    return await _delete(request, "token", _admin(request).revoke_token)


async def create_key(request: Request) -> Response:
    order = await read_body(request, CreateKeyRequest, context_of(request).limits)
    create = partial(
        _admin(request).create_key,
        order.label,
        role=KeyRole(order.role),
        limits=KeyLimits(order.models, order.requests_per_minute, order.tokens_per_day),
        life_s=order.expires_s,
    )
    made = await asyncio.to_thread(create)
    tell_audit(
        request,
        made.id,
        label=order.label or None,
        role=order.role,
        models=None if order.models is None else ", ".join(order.models),
        requests_per_minute=order.requests_per_minute,
        tokens_per_day=order.tokens_per_day,
        expires_s=order.expires_s,
    )
    return _reply(made)


async def list_keys(request: Request) -> Response:
    return _reply({"data": _admin(request).keys()})


async def revoke_key(request: Request) -> Response:
    return await _delete(request, "key", _admin(request).revoke_key)


async def create_sign_in(request: Request) -> Response:
    await read_body(request, EmptyRequest, context_of(request).limits)
    return _reply(_sessions(request).create_code())


async def sign_in(request: Request) -> Response:
    order = await read_body(request, SignInRequest, context_of(request).limits)
    return _reply({"key": _sessions(request).exchange(order.code)})


async def sign_out(request: Request) -> Response:
    _sessions(request).end(request.headers.get("authorization", "").partition(" ")[2].strip())
    return _reply({"id": caller_of(request).key_id, "deleted": True})


def _sessions(request: Request) -> PageSessions:
    sessions: PageSessions = request.app.state.sessions
    return sessions


def _admin(request: Request) -> ClusterAdmin:
    admin: ClusterAdmin = request.app.state.admin
    return admin


def _range_of(request: Request) -> HistoryRange:
    """Which part of the history the query asks for."""
    limit = _count_of(request, "limit", _USUAL_ENTRIES)
    if not 1 <= limit <= _MOST_ENTRIES:
        raise RequestError(
            f"limit is not between 1 and {_MOST_ENTRIES}.", param="limit", code="invalid_value"
        )
    return HistoryRange(
        since_s=_count_of(request, "since"),
        until_s=_count_of(request, "until", FAR_S),
        before=_count_of(request, "before"),
        limit=limit,
    )


def _count_of(request: Request, name: str, default: int = 0) -> int:
    """A whole number of the query, the default where it is left out."""
    given = request.query_params.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) <= _MOST_DIGITS):
        raise RequestError(f"{name} is not a whole number.", param=name, code="invalid_value")
    return int(given)


def _reply(value: Any) -> Response:
    # A browser or proxy that kept one of these would keep secrets, or show a cluster that is no more.
    return Response(
        msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"}
    )


async def _delete(request: Request, what: str, delete: Callable[[str], None]) -> Response:
    name = request.path_params[what]
    await _find(delete, name)
    return _reply({"id": name, "deleted": True})


async def _find(work: Callable[[str], Result], name: str) -> Result:
    """Runs what a path names in a thread; what it does not find is a 404."""
    try:
        return await asyncio.to_thread(work, name)
    except UnknownModelError:
        raise
    except UsageError as error:
        raise RequestError(error.message, hint=error.hint, code="not_found", status=404) from error


CLUSTER_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET",
        "/cluster/state",
        cluster_state,
        "Nodes, links, models, chains and what is being fetched.",
        needs=Access.OBSERVE,
        reply=ClusterView,
        statuses=(403,),
    ),
    ApiRoute(
        "GET",
        "/cluster/events",
        cluster_events,
        "The state, then its changes, until the client leaves.",
        needs=Access.OBSERVE,
        chunk=ClusterView | ClusterChange,
        statuses=(403, 429),
    ),
    ApiRoute(
        "GET",
        "/cluster/requests",
        cluster_requests,
        "Generations that run, and the last ones that ended; with `after`, without the first that many.",
        needs=Access.OBSERVE,
        reply=RequestList,
        statuses=(400, 403),
        counts=("after",),
    ),
    ApiRoute(
        "GET",
        "/cluster/usage",
        cluster_usage,
        "Tokens by API key and model, by the minute for an hour and by the hour for a week.",
        needs=Access.KEY,
        reply=UsageReport,
        statuses=(403,),
    ),
    ApiRoute(
        "GET",
        "/cluster/history/events",
        history_events,
        "What happened, in words, newest first; from `since` to `until`, in seconds since 1970. Kept across restarts.",
        needs=Access.OBSERVE,
        reply=HistoryPage[EventView],
        statuses=(400, 403),
        counts=_RANGE,
    ),
    ApiRoute(
        "GET",
        "/cluster/history/requests",
        history_requests,
        "Generations that ended from `since` to `until`, newest first. Kept across restarts.",
        needs=Access.OBSERVE,
        reply=HistoryPage[RequestView],
        statuses=(400, 403),
        counts=_RANGE,
    ),
    ApiRoute(
        "GET",
        "/cluster/history/usage",
        history_usage,
        "Tokens by API key and model, by the hour or (`span` 86400) by the day. Kept across restarts.",
        needs=Access.OBSERVE,
        reply=HistoryPage[UsageView],
        statuses=(400, 403),
        counts=(*_RANGE, "span"),
    ),
    ApiRoute(
        "GET",
        "/cluster/audit",
        audit_log,
        "Who changed what, newest first, and whether the log is whole. Kept across restarts.",
        needs=Access.OPERATE,
        reply=AuditPage,
        statuses=(400, 403),
        counts=("before", "limit"),
    ),
    ApiRoute(
        "GET",
        "/cluster/catalogue",
        cluster_catalogue,
        "The models on the coordinator's disk.",
        needs=Access.OBSERVE,
        reply=CatalogueList,
        statuses=(403,),
    ),
    ApiRoute(
        "POST",
        "/cluster/pulls",
        pull_model,
        "Fetch a model without serving it. Goes on behind the scenes; the state says how far it has come.",
        needs=Access.OPERATE,
        body=PullModelRequest,
        reply=FetchView,
        statuses=_ORDER_ERRORS,
        audit="model.pull",
    ),
    ApiRoute(
        "POST",
        "/cluster/plan",
        plan_model,
        "What loading a model would lead to. Nothing is loaded.",
        needs=Access.OPERATE,
        body=PlanModelRequest,
        reply=PlanView,
        statuses=(*_ORDER_ERRORS, 502),
    ),
    ApiRoute(
        "POST",
        "/cluster/models",
        load_model,
        "Serve another model. Goes on behind the scenes; the state says how far it has come.",
        needs=Access.OPERATE,
        body=ServeModelRequest,
        reply=FetchView,
        statuses=(*_ORDER_ERRORS, 409),
        audit="model.load",
    ),
    ApiRoute(
        "DELETE",
        "/cluster/models/{model:path}",
        unload_model,
        "Stop serving a model, or fetching it.",
        needs=Access.OPERATE,
        reply=Deleted,
        statuses=_NAMING_ERRORS,
        audit="model.unload",
    ),
    ApiRoute(
        "POST",
        "/cluster/models/{model:path}/layout",
        keep_layout,
        "Have a model's layouts stay as they are, or let them move again. What fails is replaced all the same.",
        needs=Access.OPERATE,
        body=KeepLayoutRequest,
        reply=ModelView,
        statuses=_ORDER_ERRORS,
        audit="model.keep",
    ),
    ApiRoute(
        "POST",
        "/cluster/nodes/{node:path}/drain",
        drain_node,
        "Move everything off a node, then let it leave.",
        needs=Access.OPERATE,
        body=EmptyRequest,
        reply=NodeView,
        statuses=_ORDER_ERRORS,
        audit="node.drain",
    ),
    ApiRoute(
        "POST",
        "/cluster/nodes/{node:path}/pardon",
        pardon_node,
        "Let a node work again that audits have put in quarantine.",
        needs=Access.OPERATE,
        body=EmptyRequest,
        reply=NodeView,
        statuses=_ORDER_ERRORS,
        audit="node.pardon",
    ),
    ApiRoute(
        "DELETE",
        "/cluster/nodes/{node:path}",
        revoke_node,
        "Throw a node out for good, and revoke the join tokens that it used.",
        needs=Access.OPERATE,
        reply=RevokedNode,
        statuses=_NAMING_ERRORS,
        audit="node.revoke",
    ),
    ApiRoute(
        "POST",
        "/cluster/tokens",
        create_token,
        "A new join token. Its secret is told this once.",
        needs=Access.OPERATE,
        body=CreateTokenRequest,
        reply=NewToken,
        statuses=_ORDER_ERRORS,
        audit="token.create",
    ),
    ApiRoute(
        "POST",
        "/cluster/pairing",
        open_pairing,
        "A code that lets one machine nearby in, once and for five minutes. It is told this once.",
        needs=Access.OPERATE,
        body=EmptyRequest,
        reply=NewPairing,
        statuses=(*_ORDER_ERRORS, 429),
        audit="pairing.open",
    ),
    ApiRoute(
        "GET",
        "/cluster/tokens",
        list_tokens,
        "All join tokens.",
        needs=Access.OPERATE,
        reply=TokenList,
        statuses=(403,),
    ),
    ApiRoute(
        "DELETE",
        "/cluster/tokens/{token}",
        revoke_token,
        "Nobody joins with this token any more; nodes that did stay.",
        needs=Access.OPERATE,
        reply=Deleted,
        statuses=_NAMING_ERRORS,
        audit="token.revoke",
    ),
    ApiRoute(
        "POST",
        "/cluster/keys",
        create_key,
        "A new API key. It is told this once.",
        needs=Access.OPERATE,
        body=CreateKeyRequest,
        reply=NewKey,
        statuses=_ORDER_ERRORS,
        audit="key.create",
    ),
    ApiRoute(
        "GET",
        "/cluster/keys",
        list_keys,
        "All API keys.",
        needs=Access.OPERATE,
        reply=KeyList,
        statuses=(403,),
    ),
    ApiRoute(
        "DELETE",
        "/cluster/keys/{key}",
        revoke_key,
        "This API key opens nothing any more.",
        needs=Access.OPERATE,
        reply=Deleted,
        statuses=_NAMING_ERRORS,
        audit="key.revoke",
    ),
    ApiRoute(
        "POST",
        "/cluster/sign-in",
        create_sign_in,
        "A code that signs the page in, once and for an hour: open `/#/sign-in/<code>`.",
        needs=Access.OPERATE,
        body=EmptyRequest,
        reply=SignInCode,
        statuses=_ORDER_ERRORS,
        audit="session.invite",
    ),
    ApiRoute(
        "POST",
        "/session",
        sign_in,
        "Exchange such a code for a key that lives while it is used.",
        needs=Access.OPEN,
        body=SignInRequest,
        reply=SessionKey,
        statuses=_ORDER_ERRORS,
        audit="session.open",
    ),
    ApiRoute(
        "DELETE",
        "/session",
        sign_out,
        "End the session whose key this is sent with.",
        needs=Access.KEY,
        reply=Deleted,
        audit="session.end",
    ),
)
