"""Fetches images that a request names by URL, where the operator allows it.

A client chooses the URL and the server connects, so that it could be made to ask what only it can reach: addresses of
its own network, of the machine itself, of a cloud's metadata. Hence names are resolved here, every address of them must
be public, and the connection goes to the address that was looked at. Redirects are looked at alike. No proxy, cookie or
key is used, and what comes is bounded in bytes and time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import httpx

from shardcompute.core.errors import UsageError
from shardcompute.models.image_files import MAX_IMAGE_BYTES, check_image_bytes

FetchPolicy = Literal["off", "public", "any"]
"""Which URLs of images are fetched: none, those at public addresses, or those at any."""
_MOST_REDIRECTS = 3
_MAX_URL_CHARS = 4096
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "shardcompute"}
_SEND_IT = "send the image itself, as a data: URL"
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host, for connections to this port."""


async def resolve_host(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


@dataclass(frozen=True, slots=True)
class ImageFetcher:
    """Fetches images; `transport` and `resolve` are the network's unless a test has others."""

    policy: FetchPolicy = "off"
    deadline_s: float = 15.0
    """For one image, with its redirects."""
    resolve: Resolve = resolve_host
    transport: httpx.AsyncBaseTransport | None = None

    async def fetch(self, url: str) -> bytes:
        """UsageError where that is not allowed, or does not work."""
        if self.policy == "off":
            raise UsageError(
                "images are not fetched from URLs here",
                hint=f"{_SEND_IT}; an operator can start the server with --image-urls public",
            )
        try:
            async with asyncio.timeout(self.deadline_s):
                return await self._follow(url)
        except TimeoutError:
            raise UsageError(f"it did not come within {self.deadline_s:g} s", hint=_SEND_IT) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            # The reason may tell of what only this machine can reach.
            raise UsageError("it cannot be fetched", hint=_SEND_IT) from error

    async def _follow(self, url: str) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            target = _parse(url)
            answer = await self._get(target)
            if isinstance(answer, bytes):
                return answer
            url = str(target.join(answer))
        raise UsageError(f"its URL redirects more than {_MOST_REDIRECTS} times", hint=_SEND_IT)

    async def _get(self, url: httpx.URL) -> bytes | str:
        """The content, or where it is instead."""
        address = await self._address(url)
        pinned = url.copy_with(host=address)
        request = httpx.Request(
            "GET",
            pinned,
            headers={"host": url.netloc.decode("ascii"), **_HEADERS},
            extensions={"sni_hostname": url.host, "timeout": httpx.Timeout(self.deadline_s).as_dict()},
        )
        transport = self.transport or httpx.AsyncHTTPTransport(trust_env=False)
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            response = await client.send(request, stream=True)
            try:
                if response.status_code in _REDIRECTS and "location" in response.headers:
                    return response.headers["location"]
                if response.status_code != 200:
                    raise UsageError(f"its server answered {response.status_code}", hint=_SEND_IT)
                return await _read(response)
            finally:
                await response.aclose()

    async def _address(self, url: httpx.URL) -> str:
        """The address to connect to; all of a name's must be allowed, so that asking again helps nobody."""
        addresses = await self.resolve(url.host, url.port or (443 if url.scheme == "https" else 80))
        if not addresses:
            raise UsageError("it cannot be fetched", hint=_SEND_IT)
        if self.policy != "any" and not all(map(is_public, addresses)):
            raise UsageError(
                "its URL leads to an address that is not public",
                hint=f"{_SEND_IT}; an operator can start the server with --image-urls any",
            )
        return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet: not of this machine, its network, or nobody's."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        # Some IPv6 addresses lead on to IPv4 ones.
        inner = (
            parsed.ipv4_mapped
            or parsed.sixtofour
            or (parsed.teredo or (None, None))[1]
            or _translated(parsed)
        )
        if inner is not None:
            return is_public(str(inner))
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _translated(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None


def _parse(url: str) -> httpx.URL:
    if len(url) > _MAX_URL_CHARS:
        raise UsageError(f"its URL has more than {_MAX_URL_CHARS} characters", hint=_SEND_IT)
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
        raise UsageError("its URL is none of http or https, without a user", hint=_SEND_IT)
    return parsed


async def _read(response: httpx.Response) -> bytes:
    declared = response.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit():
        check_image_bytes(int(declared[:20]))
    content = bytearray()
    # As it comes: what unpacks to more than it was would count too late.
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MAX_IMAGE_BYTES:
            check_image_bytes(len(content))
    return bytes(content)
