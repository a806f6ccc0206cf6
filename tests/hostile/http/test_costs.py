"""Requests that cost far more than they look like, and whoever else wants to be served meanwhile.

A server in a process of its own is asked for its health again and again while the body is received, read and answered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from support.api.api_server import ask_port, request
from support.api.costly_bodies import COSTLY
from support.swarm.processes import Started

HEALTH_S = 3.0
"""Far more than it takes, and far less than what any of these took before they were bounded."""
GROWTH_BYTES = 500 << 20
AT_ONCE = 8


class Watchdog:
    """Asks for health all the time; `slowest_s` is the longest that an answer took."""

    def __init__(self, server: Started, port: int) -> None:
        self.slowest_s = 0.0
        self.growth_bytes = 0
        self._process, self._port = psutil.Process(server.pid), port
        self._before = self._process.memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog")

    def __enter__(self) -> Watchdog:
        self._ask()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self._ask()

    def _ask(self) -> None:
        started_s = time.monotonic()
        status, _ = ask_port(self._port, request("/health", method="GET", host="127.0.0.1"))
        self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
        self.growth_bytes = max(self.growth_bytes, self._process.memory_info().rss - self._before)
        assert status == 200


def attack(port: int, name: str) -> int:
    path, make = COSTLY[name]
    return ask_port(port, request(path, make(), host="127.0.0.1"))[0]


@pytest.mark.parametrize("name", COSTLY)
def test_health_is_answered_meanwhile(server: Started, port: int, name: str) -> None:
    with Watchdog(server, port) as watchdog:
        status = attack(port, name)
    assert status in (200, 400, 413)
    assert watchdog.slowest_s < HEALTH_S
    assert watchdog.growth_bytes < GROWTH_BYTES


def test_many_of_them_at_once(server: Started, port: int) -> None:
    names = list(COSTLY)[:: len(COSTLY) // (4 * AT_ONCE)]
    with Watchdog(server, port) as watchdog, ThreadPoolExecutor(AT_ONCE) as crowd:
        statuses = set(crowd.map(lambda name: attack(port, name), names))
    assert statuses <= {200, 400, 413, 503}
    assert watchdog.slowest_s < HEALTH_S
    assert watchdog.growth_bytes < GROWTH_BYTES


def test_what_is_waited_for_no_longer_is_not_done(server: Started, port: int) -> None:
    """Clients that leave take their work along, as far as nobody has begun it."""
    path, make = COSTLY["a text to count"]
    content = request(path, make(), host="127.0.0.1")
    with Watchdog(server, port) as watchdog:
        for _ in range(12):
            with contextlib.suppress(OSError):
                ask_port(port, content, timeout_s=0.05)
    assert watchdog.slowest_s < HEALTH_S
