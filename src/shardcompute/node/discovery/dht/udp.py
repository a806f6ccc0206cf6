"""UDP for the hash table: one socket, one thread that receives, requests that wait for their answer for a moment.

Bounded by construction: datagrams over the limit are not read, at most so many a second are answered for one address
and for all, and nothing is kept of a sender but a count that is forgotten with the second.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkError
from shardcompute.core.sockets.hosts import plain_address
from shardcompute.node.discovery.dht.messages import (
    MOST_DATAGRAM_BYTES,
    Body,
    Neighbours,
    RecordKept,
    decode,
    encode,
)
from shardcompute.node.discovery.dht.node import Address, DhtNode

log = logging.getLogger(__name__)
ANSWER_S = 1.0
MOST_PER_SECOND = 200
MOST_PER_HOST = 20
_WATCH_S = 0.5


class AnswerLimit:
    """How many requests are answered in a second, of one host and of all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._counts: Counter[str] = Counter()

    def allows(self, host: str) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._counts.clear()
        if self._counts.total() >= MOST_PER_SECOND or self._counts[host] >= MOST_PER_HOST:
            return False
        self._counts[host] += 1
        return True


class DhtSocket(Closing):
    """A node of the hash table on a UDP port. LinkError where the port cannot be had."""

    def __init__(self, host: str, port: int, *, answer_s: float = ANSWER_S, most_per_host: int = 2) -> None:
        self._is_ipv6 = ":" in host
        family = socket.AF_INET6 if self._is_ipv6 else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            if self._is_ipv6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise LinkError(
                f"UDP port {port} on {host} cannot be used: {error.strerror or error}",
                hint="choose another with SHARDCOMPUTE_DHT_PORT",
            ) from error
        self._socket.settimeout(_WATCH_S)
        self.port: int = self._socket.getsockname()[1]
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._waiting: dict[bytes, tuple[Address, queue.SimpleQueue[tuple[bytes, Body]]]] = {}
        self._limit = AnswerLimit()
        self._closing = threading.Event()
        self.node = DhtNode(self.ask, most_per_host=most_per_host)
        self._threads = [
            threading.Thread(target=work, name="dht", daemon=True)
            for work in (self._receive_all, self._greet_all)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, address: Address, body: Body) -> tuple[bytes, Body] | None:
        number = secrets.token_bytes(8)
        answers: queue.SimpleQueue[tuple[bytes, Body]] = queue.SimpleQueue()
        with self._lock:
            self._waiting[number] = (address, answers)
        try:
            self._send(encode(number, self.node.node_id, body), address)
            return answers.get(timeout=self._answer_s)
        except (OSError, queue.Empty):
            return None
        finally:
            with self._lock:
                del self._waiting[number]

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _greet_all(self) -> None:
        while not self._closing.wait(_WATCH_S):
            self.node.greet_newcomers()

    def _receive_all(self) -> None:
        while not self._closing.is_set():
            try:
                content, sender = self._socket.recvfrom(MOST_DATAGRAM_BYTES + 1)
            except TimeoutError:
                continue
            except OSError:
                time.sleep(0.01)  # a host that refused the last datagram is told of here
                continue
            try:
                self._take(content, (plain_address(str(sender[0])), int(sender[1])))
            except Exception:
                log.exception("a datagram from %s could not be read", sender[0])

    def _take(self, content: bytes, sender: Address) -> None:
        said = decode(content)
        if said is None:
            return
        if isinstance(said.body, Neighbours | RecordKept):
            with self._lock:
                address, answers = self._waiting.get(said.number, (None, None))
            if answers is not None and address == sender:
                answers.put((said.sender, said.body))
            return
        if self._limit.allows(sender[0]):
            reply = self.node.answer(content, sender)
            if reply is not None:
                with contextlib.suppress(OSError):
                    self._send(reply, sender)

    def _send(self, content: bytes, address: Address) -> None:
        host, port = address
        # To a socket of both kinds an address of IPv4 has a name of IPv6.
        self._socket.sendto(content, (f"::ffff:{host}" if self._is_ipv6 and ":" not in host else host, port))


def parse_bootstrap(texts: Sequence[str]) -> list[Address]:
    """`host:port`, resolved; those that are unknown now are left out."""
    found: list[Address] = []
    for text in texts:
        host, _, port = text.rpartition(":")
        with contextlib.suppress(OSError, ValueError, OverflowError):
            _, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            found.append((str(address[0]), int(address[1])))
    return found
