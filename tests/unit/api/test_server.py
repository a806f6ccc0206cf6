from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from typing import Any

import httpx
import psutil
import pytest

from shardcompute.api import create_app, serve
from shardcompute.api.connections import ConnectionLimits
from shardcompute.api.server import port_holder
from shardcompute.core.errors import UsageError
from support.api.api_server import TIMEOUT_S, ApiServer, read_answer, request


def test_a_port_in_use_is_named_with_its_holder(app: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            asyncio.run(serve(app, "127.0.0.1", port))
        assert f"Port {port} is already in use" in caught.value.message
        if port_holder(port) is not None:
            assert f"(pid {os.getpid()})" in caught.value.message
            assert psutil.Process().name() in caught.value.message


def test_a_holder_that_the_system_hides_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refuse)
    assert port_holder(1) is None


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("192.0.2.1", 0)])
def test_an_address_that_cannot_be_used_is_a_usage_error(app: Any, host: str, port: int) -> None:
    with pytest.raises(UsageError):
        asyncio.run(serve(app, host, port))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly(app: Any, number: signal.Signals) -> None:
    missed: list[int] = []
    previous = signal.signal(number, lambda received, frame: missed.append(received))
    try:

        async def run() -> None:
            async with asyncio.timeout(60):
                await serve(app, port=0, on_listening=lambda host, port: signal.raise_signal(number))

        asyncio.run(run())
        assert missed == []
        signal.raise_signal(number)
        assert missed == [number]
    finally:
        signal.signal(number, previous)


def test_stopping_ends_open_streams(service: Any, fakes: Any) -> None:
    async def run() -> None:
        service.script = [*fakes.say("Hel")[:1], asyncio.Event()]
        service.closing_turns = 100
        stop = asyncio.Event()
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(
            serve(
                create_app(service),
                port=0,
                stop=stop,
                grace_s=0,
                on_listening=lambda host, port: address.set_result(f"http://{host}:{port}"),
            )
        )
        body = {"prompt": "x", "stream": True}
        async with (
            httpx.AsyncClient(base_url=await address, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            assert "Hel" in await anext(lines)
            stop.set()
            await server
            assert service.closed == 1
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]

    asyncio.run(run())


def test_stopping_answers_requests_that_still_wait(service: Any) -> None:
    async def run() -> httpx.Response:
        stop = asyncio.Event()

        class StopsTheServer(asyncio.Event):
            async def wait(self) -> Any:
                stop.set()
                return await super().wait()

        service.script = [StopsTheServer()]
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(
                serve(
                    create_app(service),
                    port=0,
                    stop=stop,
                    grace_s=0,
                    on_listening=lambda host, port: address.set_result(f"http://{host}:{port}"),
                )
            )
            async with httpx.AsyncClient(base_url=await address, trust_env=False) as client:
                return await client.post("/v1/completions", json={"prompt": "x"})

    response = asyncio.run(run())
    assert response.status_code == 503
    assert "stopping" in response.json()["error"]["message"]
    assert service.closed == 1


def test_a_listener_that_fails_ends_the_server(app: Any) -> None:
    def fail(host: str, port: int) -> None:
        raise RuntimeError("told to fail")

    with pytest.raises(RuntimeError, match="told to fail"):
        asyncio.run(serve(app, port=0, on_listening=fail))


def test_cancelling_it_frees_the_port(app: Any) -> None:
    async def run() -> int:
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(
            serve(app, port=0, on_listening=lambda host, port: listening.set_result(port))
        )
        port = await listening
        server.cancel()
        with pytest.raises(asyncio.CancelledError):
            await server
        return port

    port = asyncio.run(run())
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stream_over_a_socket_is_whole_and_leaves_the_connection_usable(
    service: Any, fakes: Any, version: str
) -> None:
    """Pieces are written without h11; what a client reads must be HTTP all the same."""

    async def run() -> bytes:
        service.script = fakes.say("Hello there, a few words")
        stop = asyncio.Event()
        address: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(
            serve(
                create_app(service), port=0, stop=stop, on_listening=lambda _, port: address.set_result(port)
            )
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", await address)
        body = b'{"prompt": "x", "stream": true}'
        head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n".encode()
        if version == "1.1":
            writer.write(request + b"\r\n" + body)
            first = await reader.readuntil(b"0\r\n\r\n")
        else:
            first = b""
        writer.write(request + b"Connection: close\r\n\r\n" + body)
        second = await reader.read()
        writer.close()
        stop.set()
        await server
        return first + second

    received = asyncio.run(asyncio.wait_for(run(), 60))
    answers = received.split(b"HTTP/1.1 200 OK")[1:]
    assert len(answers) == (2 if version == "1.1" else 1)
    for answer in answers:
        head, _, content = answer.partition(b"\r\n\r\n")
        assert (b"chunked" in head.lower()) == (version == "1.1")
        text = _unchunked(content) if version == "1.1" else content
        assert text.endswith(b"data: [DONE]\n\n")
        assert b"Hello" in text


def _unchunked(content: bytes) -> bytes:
    whole = b""
    while True:
        size, _, content = content.partition(b"\r\n")
        if not int(size, 16):
            assert content == b"\r\n"
            return whole
        whole += content[: int(size, 16)]
        assert content[int(size, 16) :].startswith(b"\r\n")
        content = content[int(size, 16) + 2 :]


def test_of_two_that_come_at_once_the_first_keeps_the_last_place(app: Any) -> None:
    """Its request is there, although nobody has read it yet: it is not the one that is silent."""
    unfinished = request("/v1/completions", b"{}").replace(b"content-length: 2", b"content-length: 9")
    with ApiServer(app, limits=ConnectionLimits(most_connections=1)) as server:
        have_come = threading.Event()
        server._loop.call_soon_threadsafe(have_come.wait, TIMEOUT_S)
        with server.connect() as first, server.connect() as second:
            first.sendall(unfinished)
            second.sendall(request("/v1/models", method="GET"))
            have_come.set()
            assert read_answer(second)[0] == 503
            first.sendall(b" " * 7)
            assert read_answer(first)[0] == 400
