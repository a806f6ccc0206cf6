"""Host names of this server: requests that call it by another name are refused, on every route.

A web page can make its own name point to this machine (DNS rebinding) and would then read whatever the server says to
the user's browser. It can do so with names only: an address that is written in digits is always the server's own.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shardcompute.api.errors import RequestError, error_response

ANY = "*"
_LOCAL_NAME = "localhost"


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Names without ports, in lower case. `*` stands for all names, `*.lan` for all that end in `.lan`."""

    names: frozenset[str] = frozenset()
    has_any_address: bool = False
    """Whether any address in digits will do, besides those of this machine's own loopback."""

    def admits(self, header: str) -> bool:
        """Whether a request with this Host header means us. One without comes from no browser."""
        if not header:
            return True
        name = _name_of(header)
        if name is None:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return self._knows(name)
        return self.has_any_address or address.is_loopback or self._knows(name)

    def _knows(self, name: str) -> bool:
        if name == _LOCAL_NAME or name in self.names or ANY in self.names:
            return True
        parents = [name[index:] for index, letter in enumerate(name) if letter == "."]
        return any(f"*{parent}" in self.names for parent in parents)


LOOPBACK_ONLY = AllowedHosts()


def hosts_of(bound: str, others: Iterable[str] = ()) -> AllowedHosts:
    """The names of a server that listens on `bound`, and `others` that somebody has given it."""
    names = {name for each in others if (name := _name_of(each))}
    try:
        address = ipaddress.ip_address(bound)
    except ValueError:
        names.add(bound.lower())
        return AllowedHosts(frozenset(names), has_any_address=bound.lower() != _LOCAL_NAME)
    if address.is_loopback:
        return AllowedHosts(frozenset(names))
    machine = socket.gethostname().lower()
    return AllowedHosts(frozenset({*names, machine, f"{machine}.local"}), has_any_address=True)


class HostMiddleware:
    """ASGI middleware that refuses requests for other hosts than this one."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allowed.admits(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        refusal = RequestError(
            "This server does not go by the name in the Host header.",
            hint="call it by its address, or start it with --allowed-host NAME",
            code="unknown_host",
            status=403,
        )
        request_id = scope.get("shardcompute.request_id", "")
        await error_response(refusal, request_id=request_id, path=scope["path"])(scope, receive, send)


def _name_of(host: str) -> str | None:
    """The name or address of a Host header, without port and last dot; None if it is none."""
    text = host.strip().lower()
    if text.startswith("["):
        name, closed, rest = text[1:].partition("]")
        is_whole = bool(closed)
    else:
        # An IPv6 address without brackets is a name that somebody gives, not one that a header has.
        name, _, rest = text.partition(":") if text.count(":") == 1 else (text, "", "")
        rest = f":{rest}" if rest else ""
        is_whole = True
    has_port = not rest or (rest[0] == ":" and rest[1:].isdigit() and rest.isascii())
    if not is_whole or not has_port or not name or any(letter in name for letter in "@/\\ \t"):
        return None
    return name.removesuffix(".")
