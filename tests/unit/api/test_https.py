"""HTTPS: served, exchanged while it serves, known by its key, and said to whoever comes without it."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardcompute.api import serve
from shardcompute.api.connections import ConnectionLimits
from shardcompute.api.tls_listener import TlsListener
from shardcompute.client import Client
from shardcompute.core.errors import AuthError, SourceError
from shardcompute.security.https.clients import trusting
from shardcompute.security.https.server import ServerTls
from shardcompute.security.https.sources import KeyedCertificate, MadeCertificate
from support.network.papers import read_end


def serve_for(
    app: Any,
    tls: ServerTls,
    visit: Callable[[int], Awaitable[None]],
    *,
    limits: ConnectionLimits | None = None,
    on_certificate: Callable[[KeyedCertificate], None] = lambda certificate: None,
) -> None:
    async def run() -> None:
        stop = asyncio.Event()
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(
                serve(
                    app,
                    port=0,
                    stop=stop,
                    grace_s=0,
                    on_listening=lambda host, bound: port.set_result(bound),
                    limits=limits,
                    tls=tls,
                    on_certificate=on_certificate,
                    certificate_every_s=0.01,
                )
            )
            try:
                await visit(await port)
            finally:
                stop.set()

    asyncio.run(run())


@pytest.fixture
def names() -> list[str]:
    return ["127.0.0.1"]


@pytest.fixture
def tls(tmp_path: Path, names: list[str]) -> ServerTls:
    return ServerTls(MadeCertificate(tmp_path / "https", lambda: names))


def test_clients_know_the_server_by_its_key(app: Any, tls: ServerTls, tmp_path: Path) -> None:
    other = ServerTls(MadeCertificate(tmp_path / "other", lambda: ["127.0.0.1"])).shown

    async def visit(port: int) -> None:
        url = f"https://127.0.0.1:{port}"

        def ask(**trust: str) -> list[str]:
            with Client(url, **trust) as client:  # type: ignore[arg-type]
                return client.models()

        assert await asyncio.to_thread(ask, tls_pin=tls.shown.pin)
        assert await asyncio.to_thread(ask, tls_certificate=tls.shown.own_pem)
        with pytest.raises(AuthError, match="another key"):
            await asyncio.to_thread(ask, tls_pin=other.pin)
        with pytest.raises(SourceError, match="not trusted here"):
            await asyncio.to_thread(ask, tls_certificate=other.own_pem)
        with pytest.raises(SourceError, match="not trusted here"):
            await asyncio.to_thread(ask)
        # Its own certificate is also what curl's --cacert takes, with names checked.
        strict = ssl.create_default_context(cadata=tls.shown.own_pem)
        async with httpx.AsyncClient(base_url=url, verify=strict, trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200

    serve_for(app, tls, visit)


def test_a_new_certificate_is_shown_without_a_restart(app: Any, tls: ServerTls, names: list[str]) -> None:
    told: asyncio.Queue[KeyedCertificate] = asyncio.Queue()
    first = tls.shown

    async def visit(port: int) -> None:
        url = f"https://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, verify=trusting(first.own_pem), trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            names.append("porch.example")
            second = await told.get()
            assert second.fingerprint != first.fingerprint
            # The connection that is open stays; a new one sees the new certificate, and only that.
            assert (await client.get("/health")).status_code == 200
        for pem, is_good in ((first.own_pem, False), (second.own_pem, True)):
            async with httpx.AsyncClient(base_url=url, verify=trusting(pem), trust_env=False) as client:
                if is_good:
                    assert (await client.get("/health")).status_code == 200
                else:
                    with pytest.raises(httpx.ConnectError):
                        await client.get("/health")

    serve_for(app, tls, visit, on_certificate=told.put_nowait)


def test_plain_http_is_told_what_is_wrong(app: Any, tls: ServerTls) -> None:
    async def visit(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            answer = await client.post("/v1/completions", content=b"x" * 10_000)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "https_required"

    serve_for(app, tls, visit)


def test_handshakes_that_never_come_hold_nobody_up(app: Any, tls: ServerTls) -> None:
    limits = ConnectionLimits(most_connections=16)

    async def visit(port: int) -> None:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
        half = socket.create_connection(("127.0.0.1", port))
        half.sendall(b"\x16\x03\x01")
        try:
            url = f"https://127.0.0.1:{port}"
            async with httpx.AsyncClient(
                base_url=url, verify=trusting(tls.shown.own_pem), trust_env=False
            ) as client:
                assert (await client.get("/health")).status_code == 200
            # Four may be under way at once: the oldest have been ended.
            silent[0].settimeout(30)
            assert await asyncio.to_thread(silent[0].recv, 1) == b""
        finally:
            for each in (*silent, half):
                each.close()

    serve_for(app, tls, visit, limits=limits)


@pytest.mark.parametrize("turns", range(6))
def test_whoever_comes_as_it_stops_is_hung_up_on(tls: ServerTls, turns: int) -> None:
    """They come so many turns of the loop before it stops: accepted or not, their handshake begun or not."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            listener = TlsListener(
                listening, tls.context, asyncio.Protocol, timeout_s=60.0, most_handshakes=4
            )
            await asyncio.sleep(0)
            with socket.create_connection(listening.getsockname(), 60.0) as client:
                for _ in range(turns):
                    await asyncio.sleep(0)
                listener.close()
                await listener.wait_closed()
                listening.close()
                gc.collect()  # of a connection that was left open it warns
                await asyncio.sleep(0)
                assert read_end(client) == b""

    asyncio.run(run())


def test_a_pin_is_asked_of_a_server_that_has_one(app: Any) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        pin = "sha256//" + "A" * 43 + "="
        with pytest.raises(SourceError, match=r"does not speak HTTPS|cannot be reached"):
            Client(f"https://127.0.0.1:{port}", tls_pin=pin)
        thread.join(30)
    started = time.monotonic()
    with pytest.raises(SourceError, match="cannot be reached"):
        Client(f"https://127.0.0.1:{port}", tls_pin=pin)
    assert time.monotonic() - started < 30
