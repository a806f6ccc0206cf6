"""Bytes that one program reads as one request and the next as two: refused, and nothing behind them is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.types import Receive, Scope, Send

from support.api.api_server import ApiServer, read_all

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /seen HTTP/1.1\r\nhost: x\r\n"
AMBIGUOUS = {
    "lines that end with LF": b"GET /seen HTTP/1.1\nhost: x\n\n",
    "one line that ends with LF": b"GET /seen HTTP/1.1\r\nhost: x\nfoo: bar\r\n\r\n",
    "a blank line of LF": b"GET /seen HTTP/1.1\r\nhost: x\r\n\n",
    "a CR alone": b"GET /seen HTTP/1.1\r\nhost: x\r\nfoo: bar\rcontent-length: 4\r\n\r\n",
    "a zero": b"GET /seen HTTP/1.1\r\nhost: x\r\nfoo: b\0r\r\n\r\n",
    "a length and chunks": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths that differ": POST + b"content-length: 0\r\ncontent-length: 5\r\n\r\n",
    "two lengths that agree": POST + b"content-length: 0\r\ncontent-length: 0\r\n\r\n",
    "a list of lengths": POST + b"content-length: 0, 0\r\n\r\n",
    "a length with a sign": POST + b"content-length: +0\r\n\r\n",
    "a length of nothing": POST + b"content-length:\r\n\r\n",
    "two encodings": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "encodings in a list": POST + b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "a hidden encoding": POST + b"transfer-encoding : chunked\r\ncontent-length: 0\r\n\r\n",
    "an encoding after a tab": POST + b"transfer-encoding:\x0bchunked\r\ncontent-length: 0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /seen HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a line that goes on": b"GET /seen HTTP/1.1\r\nhost: x\r\nfoo: bar\r\n transfer-encoding: chunked\r\n\r\n",
    "a first line that goes on": b"GET /seen HTTP/1.1\r\n host: x\r\nhost: x\r\n\r\n",
    "two hosts": b"GET /seen HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "a chunk that ends with LF": POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\n0\r\n\r\n",
    "a size that ends with LF": POST + b"transfer-encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n",
    "a size with a sign": POST + b"transfer-encoding: chunked\r\n\r\n+1\r\nx\r\n0\r\n\r\n",
    "a size of another kind": POST + b"transfer-encoding: chunked\r\n\r\n0x1\r\nx\r\n0\r\n\r\n",
    "a length behind the chunks": POST
    + b"transfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 4\nfoo: bar\r\n\r\n",
}
FINE = {
    "a request": b"GET /seen HTTP/1.1\r\nhost: x\r\n\r\n",
    "spaces around a value": POST + b"content-length: \t0 \t\r\n\r\n",
    "chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n1;name=value\r\nx\r\n0\r\n\r\n",
    "chunks with fields behind them": POST + b"transfer-encoding: chunked\r\n\r\n0\r\nfoo: bar\r\n\r\n",
    "the same name twice": b"GET /seen HTTP/1.1\r\nhost: x\r\naccept: a\r\naccept: b\r\n\r\n",
}


@pytest.fixture(scope="module")
def seen() -> list[str]:
    return []


@pytest.fixture(scope="module")
def api(seen: list[str]) -> Iterator[ApiServer]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    with ApiServer(app) as api:
        yield api


def exchange(api: ApiServer, content: bytes, *, pieces: int = 1) -> bytes:
    """All that comes back; the last request asks for the end of the connection."""
    with api.connect() as sock:
        size = -(-len(content) // pieces)
        try:
            for start in range(0, len(content), size):
                sock.sendall(content[start : start + size])
        except OSError:  # it was refused before all of it was sent
            pass
        return b"".join(read_all(sock))


@pytest.mark.parametrize("content", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_has_two_readings_is_refused(api: ApiServer, seen: list[str], content: bytes) -> None:
    seen.clear()
    for pieces in (1, len(content) + len(HIDDEN)):
        answer = exchange(api, content + HIDDEN, pieces=pieces)
        assert "/hidden" not in seen
        assert answer.startswith(b"HTTP/1.1 400") or not answer
        assert answer.count(b"HTTP/1.1 ") <= 1
    # One whose body is wrong may have been begun, but is never whole.
    assert seen == []


@pytest.mark.parametrize("content", FINE.values(), ids=FINE)
def test_what_has_one_reading_is_answered(api: ApiServer, seen: list[str], content: bytes) -> None:
    seen.clear()
    ending = HIDDEN.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert exchange(api, content + ending, pieces=3).count(b"HTTP/1.1 200") == 2
    assert seen == ["/seen", "/hidden"]
