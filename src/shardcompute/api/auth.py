"""Authentication and authorisation of requests: who asks, and whether the route is for them.

A key comes as `Authorization: Bearer <key>` or `x-api-key: <key>`, and verifiers say whose it is. No address is
trusted: where no key is asked for, whoever reaches the server may use models and nothing else, and those who say that
a proxy sent them may not even do that. What a route needs is declared with it and checked by `guarded`, for all routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shardcompute.api.access.limited_service import LimitedService
from shardcompute.api.access.metering import KeyMeter
from shardcompute.api.access.requirement import ANONYMOUS, Access, check_access
from shardcompute.api.access.sign_in import SESSION_PREFIX
from shardcompute.api.context import caller_of, context_of
from shardcompute.api.errors import RequestError, error_response
from shardcompute.core.errors import AuthError, ShardComputeError, UsageError
from shardcompute.node.telemetry.audit import AuditLog
from shardcompute.security.api_keys import KEY_PREFIX, NO_LIMITS, KeyRole, KeySummary, key_id_of
from shardcompute.security.local_secret import SECRET_PREFIX

_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
"""What proxies say of themselves, unless they are told not to."""
_PASSING = (SESSION_PREFIX, SECRET_PREFIX)
"""Keys that end with their session, or with the server."""
Verifier = Callable[[str], KeySummary | None]
"""Whose key this is, as the header has it (bytes read as latin-1); None if unknown, AuthError if it was good once."""
Endpoint = Callable[[Request], Awaitable[Response]]


class ApiKeys:
    """Keys that were given at the start, kept as digests. A role may stand before one (`observe KEY`); else `use`."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[str]) -> None:
        given = [split_role(key) for key in keys]
        if not given or not all(key for _, key in given):
            raise UsageError(
                "The list of API keys is empty or holds an empty key.", hint="pass at least one key"
            )
        self._keys = tuple((_digest(key.encode()), name_key(key), role) for role, key in given)

    def find(self, key: str) -> KeySummary | None:
        """Compares with every digest, so that the time taken does not depend on which one matches."""
        offered = _digest(key.encode("latin-1"))
        matches = [each for each in self._keys if hmac.compare_digest(offered, each[0])]
        return KeySummary(matches[0][1], role=matches[0][2]) if matches else None


def secret_of(owner: KeySummary, secret: str) -> Verifier:
    """Verifies one key of a known owner, such as the cluster's local secret."""
    digest = _digest(secret.encode())

    def find(key: str) -> KeySummary | None:
        return owner if hmac.compare_digest(_digest(key.encode("latin-1")), digest) else None

    return find


class KeyMiddleware:
    """ASGI middleware that finds out who asks, and answers 401 to those who must say so and do not.

    `anonymous` is whom requests without a key count as; None: they are refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        verifiers: Sequence[Verifier],
        anonymous: KeySummary | None,
        open_paths: frozenset[str],
    ) -> None:
        self._app = app
        self._verifiers = tuple(verifiers)
        self._anonymous = anonymous
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope["shardcompute.caller"] = self._identify(Headers(scope=scope))
        except RequestError as refusal:
            if scope["path"] not in self._open_paths:
                request_id = scope.get("shardcompute.request_id", "")
                await error_response(refusal, request_id=request_id, path=scope["path"])(scope, receive, send)
                return
            scope["shardcompute.caller"] = ANONYMOUS
        await self._app(scope, receive, send)

    def _identify(self, headers: Headers) -> KeySummary:
        key = key_of(headers)
        try:
            found = next((each for verify in self._verifiers if (each := verify(key))), None) if key else None
        except AuthError as error:
            raise _refusal(f"{error.message}.", error.hint) from None
        if found is not None:
            return found
        if key.startswith(_PASSING):
            # Never taken for any text that somebody sends where no key is needed.
            raise _refusal("This sign-in is over.", "`shardcompute page` prints a link that signs in anew")
        if self._anonymous is not None and not any(name in headers for name in _FORWARDED):
            return self._anonymous
        if key:
            raise _refusal("The API key is not one that this server accepts.")
        if self._anonymous is not None:
            raise _refusal("Requests that come through a proxy need an API key.")
        raise _refusal("This server wants an API key and the request has none.")


def guarded(needs: Access, run: Endpoint, audit: str = "") -> Endpoint:
    """`run` for those who may, within the limits of their key; 403 and 429 for others. What has a name in the audit log
    is in it, done or refused."""

    async def check_and_run(request: Request) -> Response:
        if not audit:
            return await check_then_run(request)
        try:
            answer = await check_then_run(request)
        except (HTTPException, ShardComputeError) as error:
            message = error.message if isinstance(error, ShardComputeError) else str(error.detail)
            await _audit(request, audit, f"refused: {message}")
            raise
        await _audit(request, audit, "done")
        return answer

    async def check_then_run(request: Request) -> Response:
        caller = caller_of(request)
        check_access(needs, caller)
        if caller.limits != NO_LIMITS and needs is not Access.OPEN:
            meter: KeyMeter = request.app.state.meter
            # Lists and versions cost nothing; whatever has a body does.
            await meter.admit(caller, is_counted=request.method == "POST")
            service = context_of(request).service
            request.scope["shardcompute.service"] = LimitedService(service, caller, meter)
        return await run(request)

    check_and_run.needs = needs  # type: ignore[attr-defined]
    return check_and_run


async def _audit(request: Request, action: str, result: str) -> None:
    named = next(iter(request.path_params.values()), "")
    target, detail = request.scope.get("shardcompute.audit", (named, {}))
    log: AuditLog = request.app.state.admin.audit
    who = caller_of(request).key_id or "anybody"
    await asyncio.to_thread(log.append, who, action, target, result=result, detail=detail)


def needs_of(route: Route) -> Access:
    """What a route that is `guarded` needs."""
    needs: Access = route.endpoint.needs  # type: ignore[attr-defined]
    return needs


def split_role(line: str) -> tuple[KeyRole, str]:
    """A line of a file of keys: the key, perhaps with its role before it."""
    role, _, key = line.strip().partition(" ")
    if role in list(KeyRole):
        return KeyRole(role), key.strip()
    return KeyRole.USE, line.strip()


def name_key(key: str) -> str:
    """What a key may be called in lists and counts: its public id, or a few digits of its hash."""
    if key.startswith(KEY_PREFIX):
        return key_id_of(key)
    return f"key-{_digest(key.encode()).hex()[:8]}"


def key_of(headers: Headers) -> str:
    """The key of a request, empty if it has none. Anthropic's clients send it in a header of its own."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "").strip()


def _refusal(message: str, hint: str = "send the header Authorization: Bearer <key>") -> RequestError:
    return RequestError(
        message,
        hint=hint,
        code="invalid_api_key",
        status=401,
        headers={"www-authenticate": "Bearer"},
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
