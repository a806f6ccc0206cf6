"""The HTTP port of a running swarm among enemies: garbage, absurd requests, slow and silent clients, storms.

After every test the swarm must answer a request over HTTP.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcompute.api import Limits, create_app
from shardcompute.api.connections import BoundedConnection, ConnectionLimits, choose_most_connections
from support.api.api_server import TIMEOUT_S, ApiServer, read_all, read_answer, request
from support.network.papers import drip
from support.swarm.lab import LabSwarm, swarm

KEY = "key"
ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
IDLE_CONNECTIONS = 1000
NOTHING = 0
"""The connection ends without a word."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[LabSwarm]:
    with swarm(tmp_path_factory.mktemp("hostile"), tiny, layers=(3, 3), stages=2) as lab:
        yield lab


@pytest.fixture(scope="module")
def api(lab: LabSwarm) -> Iterator[ApiServer]:
    limits = Limits(body_timeout_s=0.5)
    with ApiServer(create_app(lab.cluster.pool, api_keys=[f"observe {KEY}"], limits=limits)) as api:
        yield api


@pytest.fixture(scope="module")
def expected(api: ApiServer) -> str:
    return text_of(api)


@pytest.fixture(autouse=True)
def goes_on(api: ApiServer, lab: LabSwarm, expected: str) -> Iterator[None]:
    epoch = lab.chain().epoch
    yield
    assert text_of(api) == expected
    lab.wait_quiet()
    # Whatever was asked, it has held up no heartbeat for long.
    assert lab.chain().epoch == epoch


def bounded(lab: LabSwarm, **limits: Any) -> ApiServer:
    """A server of its own, with these limits."""
    return ApiServer(
        create_app(lab.cluster.pool, api_keys=[f"observe {KEY}"]), limits=ConnectionLimits(**limits)
    )


def text_of(api: ApiServer) -> str:
    status, reply = api.post("/v1/completions", ASK)
    assert status == 200, reply
    text: str = reply["choices"][0]["text"]
    return text


# Garbage


NO_REQUESTS: dict[str, tuple[bytes, int]] = {
    "zeros": (b"\0" * 1000, 400),
    "the beginning of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 500, 400),
    "a frame that has no line": (b"SCw\x01\xff\xff\xff\xff", NOTHING),
    "a method alone": (b"GET\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "no header": (b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nname without colon\r\n\r\n", 400),
    "a long path": (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 400),
    "less than no length": (b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n", 400),
    "two lengths": (
        b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        400,
    ),
    "no encoding": (b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: king\r\n\r\n", 400),
    # What can be read as a request has no key.
    "a version to come": (b"GET / HTTP/9.9\r\n\r\n", 401),
    "very many headers": (b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 401),
}


@pytest.mark.parametrize(("content", "status"), NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_what_is_no_request(api: ApiServer, content: bytes, status: int) -> None:
    with api.connect() as sock:
        with contextlib.suppress(OSError):
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
        assert read_answer(sock)[0] == status


def test_garbage_behind_a_request(api: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    """While it is answered, and where the answer came before the request was over."""
    body = json.dumps({**ASK, "max_tokens": 100, "stream": True, "ignore_eos": True}).encode()
    unfinished = request("/v1/completions", key="wrong").replace(
        b"content-length: 0", b"transfer-encoding: chunked"
    )
    for content, wanted in ((request("/v1/completions", body), b"[DONE]"), (unfinished, b"invalid_api_key")):
        with api.connect() as sock:
            sock.sendall(content.replace(b"connection: close\r\n", b""))
            came = sock.recv(100)
            sock.sendall(b"\0 garbage \r\n\r\n")
            assert wanted in came + b"".join(read_all(sock))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_garbage_fills_no_log(lab: LabSwarm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    upgrade = request("/v1/models", method="GET", headers="upgrade: websocket\r\n")
    garbage = (b"\0\r\n\r\n", upgrade.replace(b"connection: close", b"connection: upgrade"))
    with bounded(lab) as api:
        # Once it has answered, it has said all that a start says.
        assert api.ask(request("/health", method="GET"))[0] == 200
        caplog.clear()
        for content in (each for each in garbage for _ in range(20)):
            with api.connect() as sock:
                sock.sendall(content)
                sock.shutdown(socket.SHUT_WR)
                read_answer(sock)
        # The log of requests is seen by tests alone.
        lines = [r for r in caplog.records if r.name.startswith(("uvicorn.error", "shardcompute.api"))]
    assert [r.getMessage() for r in lines] == [
        "something that is no HTTP request came to the API",
        "a client asked for another protocol than HTTP",
    ]


# Absurd requests

TOO_MUCH: dict[str, tuple[dict[str, Any], int]] = {
    "very many tokens": ({"max_tokens": 10**9}, 400),
    "more tokens than any number": ({"max_tokens": 10**30}, 400),
    "less than no tokens": ({"max_tokens": -1}, 400),
    "very many answers": ({"n": 10**6}, 400),
    "very many prompts": ({"prompt": ["x"] * 10_000}, 400),
    "a long prompt": ({"prompt": "x" * 1_000_000}, 400),
    "tokens that are none": ({"prompt": [2**31 - 1]}, 400),
    "very many biases": ({"logit_bias": {str(i): 1 for i in range(5000)}}, 400),
    "very many stops": ({"stop": ["x"] * 10_000}, 400),
    "a temperature": ({"temperature": 1e300}, 400),
    "a seed": ({"seed": 2**200}, 400),
    "another model": ({"model": "../" * 1000}, 404),
    "a name": ({"model": "\0\x1b[2J"}, 404),
}


@pytest.mark.parametrize(("change", "status"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_asking_for_too_much(api: ApiServer, change: dict[str, Any], status: int) -> None:
    answered, reply = api.post("/v1/completions", {**ASK, **change})
    assert answered == status
    assert len(json.dumps(reply)) < 20_000
    assert reply["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"prompt":' * 30_000,
        b'{"prompt": 1' + b"0" * 100_000 + b"}",
        b"\xff\xfe",
        b'"\\ud800"',
    ],
    ids=["arrays", "objects", "a long number", "bytes", "half a character"],
)
def test_json_that_is_none(api: ApiServer, body: bytes) -> None:
    assert api.ask(request("/v1/completions", body))[0] == 400


def test_bodies_beyond_the_limit(api: ApiServer) -> None:
    limit = Limits().max_body_bytes
    announced = request("/v1/completions").replace(b"content-length: 0", b"content-length: %d" % (limit + 1))
    assert api.ask(announced)[0] == 413
    whole = request("/v1/completions", b" " * (limit + 1))
    assert api.ask(whole)[0] == 413
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    chunked = request("/v1/completions").replace(b"content-length: 0", b"transfer-encoding: chunked")
    assert api.ask(chunked + chunk * 9 + b"0\r\n\r\n")[0] == 413


def test_storms_of_wrong_paths_and_methods(api: ApiServer) -> None:
    for number in range(200):
        assert api.ask(request(f"/no/{number}", method="GET"))[0] == 404
        assert api.ask(request("/v1/completions", method="DELETE"))[0] == 405
    assert api.ask(request("/v1/models", method="BREW"))[0] == 405
    metrics = api.ask(request("/metrics", method="GET"))[1].decode()
    assert "/no/" not in metrics
    assert "BREW" not in metrics


def test_clients_that_leave_at_once(api: ApiServer, lab: LabSwarm) -> None:
    body = json.dumps({**ASK, "max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
    for _ in range(30):
        with api.connect() as sock:
            sock.sendall(request("/v1/completions", body))
    lab.wait_quiet()


# Slow and silent clients


def test_a_crowd_of_silent_connections(api: ApiServer, expected: str) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(IDLE_CONNECTIONS):
            crowd.enter_context(api.connect())
        assert text_of(api) == expected


def test_more_connections_than_are_allowed(lab: LabSwarm, expected: str) -> None:
    """Who has been silent longest goes; who is being answered stays."""
    with (
        bounded(lab, most_connections=8) as small,
        contextlib.ExitStack() as opened,
    ):
        busy = opened.enter_context(small.connect())
        body = json.dumps({**ASK, "max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
        busy.sendall(request("/v1/completions", body))
        assert busy.recv(100).startswith(b"HTTP/1.1 200")
        crowd = [opened.enter_context(small.connect()) for _ in range(40)]
        assert text_of(small) == expected
        assert [read_answer(sock) for sock in crowd[:30]] == [(0, b"")] * 30
        assert b"[DONE]" in b"".join(read_all(busy))


def test_the_bound_leaves_files_for_the_cluster() -> None:
    assert 64 <= choose_most_connections() <= 4096


@pytest.mark.parametrize("content", [b"", b"POST /v1/comple", request("/v1/completions")[:-2]])
def test_heads_that_never_end(lab: LabSwarm, content: bytes) -> None:
    with bounded(lab, head_timeout_s=0.5) as hasty, hasty.connect() as sock:
        sock.sendall(content)
        drip(sock, b"a" if content else b"")
        # A request that takes its time to be answered is none of these.
        assert hasty.post("/v1/completions", {**ASK, "max_tokens": 300, "ignore_eos": True})[0] == 200


def test_a_second_request_that_never_ends(lab: LabSwarm) -> None:
    with bounded(lab, head_timeout_s=0.5) as hasty, hasty.connect() as sock:
        sock.sendall(request("/health", method="GET").replace(b"connection: close\r\n", b""))
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        drip(sock, b"G")


def test_bodies_that_never_end(api: ApiServer) -> None:
    """A byte now and then does not extend the time."""
    announced = request("/v1/completions").replace(b"content-length: 0", b"content-length: 1000")
    with api.connect() as sock:
        sock.sendall(announced)
        assert drip(sock, b" ").startswith(b"HTTP/1.1 408")


def test_clients_that_do_not_read(lab: LabSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = threading.Event()
    end = BoundedConnection.connection_lost

    def note(connection: BoundedConnection, error: Exception | None) -> None:
        end(connection, error)
        lost.set()

    monkeypatch.setattr(BoundedConnection, "connection_lost", note)
    body = json.dumps({"prompt": "x" * 1_000_000, "return_token_strs": True}).encode()
    with bounded(lab, write_timeout_s=0.2) as hasty, hasty.connect(receive_bytes=4096) as sock:
        sock.sendall(request("/tokenize", body))
        assert lost.wait(TIMEOUT_S), "the server waits for a client that does not read"
        assert len(b"".join(read_all(sock))) < 7_000_000
    with bounded(lab, write_timeout_s=TIMEOUT_S) as patient:
        assert patient.ask(request("/tokenize", body))[1].endswith(b"]}")


# Keys


def test_no_route_but_health_answers_without_a_key(lab: LabSwarm, api: ApiServer) -> None:
    document = json.loads(api.ask(request("/openapi.json", method="GET"))[1])
    routes = [(path, method.upper()) for path, methods in document["paths"].items() for method in methods]
    assert len(routes) >= 9
    for path, method in [*routes, ("/openapi.json", "GET"), ("/no/such/path", "GET"), ("/", "OPTIONS")]:
        for key in ("", "wrong", "key2", "\xff"):
            status = api.ask(request(path, b"{}", method=method, key=key))[0]
            assert status == (200 if path == "/health" else 401), (path, method, key)
    for path in (
        "/health/",
        "/health/..",
        "//health",
        "/health%2f",
        "/v1/models?x=/health",
        "/health/v1/models",
    ):
        assert api.ask(request(path, method="GET", key="wrong"))[0] == 401, path
