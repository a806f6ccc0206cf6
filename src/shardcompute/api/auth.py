"""Authentication by API keys: `Authorization: Bearer <key>` or `x-api-key: <key>`, which a verifier accepts or not.

`ApiKeys` verifies against a list given at the start, kept as SHA-256 digests and compared in constant time; a
cluster brings its own book of keys. `/health` answers without a key, so that probes need none. Where no key is
asked for, the routes that steer a cluster are for programs on this machine alone.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shardcompute.api.errors import RequestError, error_response
from shardcompute.core.errors import UsageError
from shardcompute.security.api_keys import KEY_PREFIX, key_id_of

CLUSTER_PATH = "/cluster/"
OPEN_PATHS = frozenset({"/health"})
Verifier = Callable[[str], bool]
"""Whether a key, as the header has it (bytes read as latin-1), is accepted."""


class ApiKeys:
    """A set of accepted keys."""

    __slots__ = ("_digests",)

    def __init__(self, keys: Iterable[str]) -> None:
        keys = tuple(keys)
        if not keys or not all(keys):
            raise UsageError(
                "The list of API keys is empty or holds an empty key.", hint="pass at least one key"
            )
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def accepts(self, key: str) -> bool:
        """Compares with every digest, so that the time taken does not depend on which one matches."""
        offered = _digest(key.encode("latin-1"))
        matches = [hmac.compare_digest(offered, digest) for digest in self._digests]
        return any(matches)


class ApiKeyMiddleware:
    """ASGI middleware that answers 401 to requests without an accepted key."""

    def __init__(
        self, app: ASGIApp, verifiers: Iterable[Verifier], open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._verifiers = tuple(verifiers)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        key = _key_of(Headers(scope=scope))
        refusal = self._refusal(key)
        if refusal is None:
            scope["shardcompute.caller"] = name_key(key)
            await self._app(scope, receive, send)
        else:
            request_id = scope.get("shardcompute.request_id", "")
            response = error_response(refusal, request_id=request_id, path=scope["path"])
            await response(scope, receive, send)

    def _refusal(self, key: str) -> RequestError | None:
        if not key:
            message = "This server wants an API key and the request has none."
        elif not any(accepts(key) for accepts in self._verifiers):
            message = "The API key is not one that this server accepts."
        else:
            return None
        return RequestError(
            message,
            hint="send the header Authorization: Bearer <key>",
            code="invalid_api_key",
            status=401,
            headers={"www-authenticate": "Bearer"},
        )


class LoopbackMiddleware:
    """ASGI middleware for an API without keys: 403 to those who would steer a cluster from elsewhere.

    Neither the caller nor the name it calls us by may be foreign: a web page that makes its own name point to
    this machine is shown no token.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(CLUSTER_PATH) or _is_local(scope):
            await self._app(scope, receive, send)
            return
        refusal = RequestError(
            "The cluster can be steered without an API key from its own machine only.",
            hint="call it by an address such as 127.0.0.1, or start it with --api-key",
            code="forbidden",
            status=403,
        )
        await error_response(refusal)(scope, receive, send)


def name_key(key: str) -> str:
    """What a key may be called in lists and counts: its public id, or a few digits of its hash."""
    if key.startswith(KEY_PREFIX):
        return key_id_of(key)
    return f"key-{_digest(key.encode('latin-1')).hex()[:8]}"


def _key_of(headers: Headers) -> str:
    """The key of a request, empty if it has none. Anthropic's clients send it in a header of its own."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "").strip()


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    host = Headers(scope=scope).get("host", "").rpartition("@")[2]
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return client is not None and _is_loopback(client[0]) and (name == "localhost" or _is_loopback(name))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
