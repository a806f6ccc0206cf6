"""Images named by URL: fetched only where that is allowed, from where that is allowed, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from shardcompute.api.images import fetching
from shardcompute.api.images.fetching import FetchPolicy, ImageFetcher, is_public
from shardcompute.core.errors import UsageError

PUBLIC = {"pictures.example": ["93.184.216.34"], "two.example": ["93.184.216.34", "2606:2800:220:1::1"]}
PRIVATE = {
    "localhost": ["127.0.0.1"],
    "router.example": ["192.168.0.1"],
    "metadata.example": ["169.254.169.254"],
    "both.example": ["93.184.216.34", "10.0.0.1"],
    "six.example": ["::1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "nowhere.example": [],
}


def fetcher(
    answer: Callable[[httpx.Request], httpx.Response], policy: FetchPolicy = "public"
) -> ImageFetcher:
    async def resolve(host: str, port: int) -> list[str]:
        return (PUBLIC | PRIVATE).get(host, [host])

    return ImageFetcher(policy, deadline_s=5.0, resolve=resolve, transport=httpx.MockTransport(answer))


def fetch(
    url: str, answer: Callable[[httpx.Request], httpx.Response], policy: FetchPolicy = "public"
) -> bytes:
    return asyncio.run(fetcher(answer, policy).fetch(url))


def never(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"{request.url} was asked for")


def test_nothing_is_fetched_unless_the_operator_says_so() -> None:
    with pytest.raises(UsageError, match="not fetched") as refused:
        fetch("https://pictures.example/a.png", never, "off")
    assert "--image-urls" in refused.value.hint
    assert ImageFetcher().policy == "off"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_image_is_fetched_from_the_address_that_was_looked_at(scheme: str) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"image"))

    assert fetch(f"{scheme}://pictures.example:8443/a.png?b=c", answer) == b"image"
    [request] = seen
    assert str(request.url) == f"{scheme}://93.184.216.34:8443/a.png?b=c"
    assert request.headers["host"] == "pictures.example:8443"
    assert request.extensions["sni_hostname"] == "pictures.example"
    assert "cookie" not in request.headers
    assert "authorization" not in request.headers


@pytest.mark.parametrize("host", [*PRIVATE, "127.0.0.1", "10.1.2.3", "[::1]", "169.254.169.254", "0.0.0.0"])
def test_what_is_not_public_is_not_asked(host: str) -> None:
    with pytest.raises(UsageError) as refused:
        fetch(f"http://{host}/secret", never)
    assert "secret" not in str(refused.value)


def test_private_addresses_are_asked_where_the_operator_wants_that() -> None:
    assert (
        fetch(
            "http://router.example/a",
            lambda request: httpx.Response(200, stream=httpx.ByteStream(b"x")),
            "any",
        )
        == b"x"
    )


@pytest.mark.parametrize(
    "to", ["http://localhost/", "http://169.254.169.254/latest", "file:///etc/passwd", "//10.0.0.1/"]
)
def test_redirects_lead_nowhere_else(to: str) -> None:
    with pytest.raises(UsageError):
        fetch("http://pictures.example/a", lambda request: _redirect(request, to))


def _redirect(request: httpx.Request, to: str) -> httpx.Response:
    assert request.url.host == "93.184.216.34"
    return httpx.Response(302, headers={"location": to})


def test_redirects_are_followed_and_not_for_ever() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/b":
            return httpx.Response(200, stream=httpx.ByteStream(b"image"))
        return httpx.Response(301, headers={"location": "/b" if request.url.path == "/a" else "/loop"})

    assert fetch("http://pictures.example/a", answer) == b"image"
    with pytest.raises(UsageError, match="redirects more than"):
        fetch("http://pictures.example/loop", answer)


class _Endless(httpx.AsyncByteStream):
    def __init__(self, chunk: bytes) -> None:
        self.chunk = chunk
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.sent += len(self.chunk)
            yield self.chunk
            await asyncio.sleep(0)


@pytest.mark.parametrize("headers", [{}, {"content-length": str(1 << 40)}])
def test_no_more_is_read_than_an_image_may_have(monkeypatch: pytest.MonkeyPatch, headers: Any) -> None:
    monkeypatch.setattr(fetching, "MAX_IMAGE_BYTES", 1000)
    monkeypatch.setattr("shardcompute.models.image_files.MAX_IMAGE_BYTES", 1000)
    stream = _Endless(b"x" * 100)
    with pytest.raises(UsageError, match="MiB"):
        fetch(
            "http://pictures.example/a", lambda request: httpx.Response(200, headers=headers, stream=stream)
        )
    assert stream.sent <= 1100


def test_whoever_is_slow_is_given_up() -> None:
    async def run() -> None:
        class Silent(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                await asyncio.Event().wait()
                raise AssertionError

        async def resolve(host: str, port: int) -> list[str]:
            return PUBLIC[host]

        slow = ImageFetcher("public", deadline_s=0.05, resolve=resolve, transport=Silent())
        with pytest.raises(UsageError, match="did not come within"):
            await slow.fetch("http://pictures.example/a")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://user:pass@pictures.example/", "without a user"),
        ("ftp://pictures.example/a", "none of http"),
        ("http:///a", "none of http"),
        ("http://pictures.example/" + "a" * 5000, "characters"),
        ("http://[::1", "cannot be fetched"),
    ],
)
def test_odd_urls_are_refused(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fetch(url, never)


def test_what_went_wrong_is_not_told_in_detail() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused by 10.0.0.5")

    with pytest.raises(UsageError) as refused:
        fetch("http://pictures.example/a", answer)
    assert "10.0.0.5" not in str(refused.value)
    with pytest.raises(UsageError, match="answered 404"):
        fetch("http://pictures.example/a", lambda request: httpx.Response(404))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("64:ff9b::808:808", True),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::", False),
        ("::ffff:10.0.0.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("nonsense", False),
    ],
)
def test_which_addresses_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_a_real_server_is_reached_by_its_address() -> None:
    async def run() -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nimage")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await ImageFetcher("any").fetch(f"http://127.0.0.1:{port}/a")

    assert asyncio.run(run()) == b"image"
