"""A server that may open few files, and more clients than files."""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import pytest

from support.api.api_server import ask_port, request
from support.swarm.processes import Started

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no limit on files")
FEW_FILES = ("bash", "-c", 'ulimit -n 64; exec "$@"', "bash")
HEALTH = request("/health", method="GET", host="127.0.0.1")
AT_ONCE_S = 20.0
"""On a machine that is busy with other work; a place that a silent client gives up by itself takes half a minute."""


@pytest.fixture(scope="module")
def within() -> tuple[str, ...]:
    return FEW_FILES


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30)


def test_it_says_how_few_connections_it_has(server: Started) -> None:
    server.wait_for(r"connections to the API at once: this process may open 64 files")


@pytest.mark.parametrize("content", [b"", b"POST /v1/comple"], ids=["silent", "half a head"])
def test_health_is_answered_among_silent_clients(port: int, content: bytes) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(200):
            crowd.enter_context(connected(port)).sendall(content)
        for _ in range(10):
            started_s = time.monotonic()
            assert ask_port(port, HEALTH)[0] == 200
            assert time.monotonic() - started_s < AT_ONCE_S


def test_health_is_answered_among_busy_clients(port: int) -> None:
    """Their bodies are under way; who comes on top is told so."""
    unfinished = request("/v1/completions", b"{}", host="127.0.0.1").replace(
        b"content-length: 2", b"content-length: 9"
    )
    with contextlib.ExitStack() as crowd:
        for _ in range(100):
            crowd.enter_context(connected(port)).sendall(unfinished)
            # How many there are is seen by the answers when all are taken.
            status = ask_port(port, request("/v1/models", method="GET", host="127.0.0.1"))[0]
            if status == 503:
                break
        assert status == 503
        for _ in range(10):
            started_s = time.monotonic()
            assert ask_port(port, HEALTH)[0] == 200
            assert time.monotonic() - started_s < AT_ONCE_S
    assert ask_port(port, HEALTH)[0] == 200
