"""Connecting to whichever address of a host answers first, IPv6 before IPv4 (RFC 8305).

A name often has addresses of both kinds, of which one leads nowhere and says nothing. So an attempt has a short head
start before the next one begins beside it; the first that connects wins, and the others are closed.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

HEAD_START_S = 0.25
"""So long an address is tried alone, unless it fails before."""
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK))
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
Target = tuple[str, int]
_Candidate = tuple[int, int, Any]
"""The place of its target, the family and the address."""
_Row = tuple[Any, ...]


class ConnectError(OSError):
    """No target answered; `reasons` says why, by the targets' places."""

    def __init__(self, number: int | None, text: str, reasons: dict[int, str]) -> None:
        super().__init__(number, text)
        self.reasons = reasons


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to one of a host's addresses, with `timeout_s` for each wait on it. Raises OSError, of the kind that
    connecting to a single address would raise: a refusal is a ConnectionRefusedError."""
    try:
        return connect_first([(host, port)], timeout_s)[0]
    except ConnectError as error:
        raise OSError(error.errno, error.strerror) from error


def connect_first(targets: Sequence[Target], timeout_s: float) -> tuple[socket.socket, int]:
    """A connection to one of these, and the place of the one that answered. Raises ConnectError."""
    race = _ConnectRace(targets, timeout_s)
    try:
        return race.run()
    finally:
        race.close()


class _ConnectRace:
    """Attempts under way, in one thread."""

    def __init__(self, targets: Sequence[Target], timeout_s: float) -> None:
        self._timeout_s = max(timeout_s, 0.01)
        self._deadline = time.monotonic() + self._timeout_s
        self._failures: dict[int, OSError] = {}
        self._left = deque(_resolved(targets, self._failures))
        self._running: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> tuple[socket.socket, int]:
        next_at_s = 0.0
        while self._left or self._running:
            now_s = time.monotonic()
            if now_s >= self._deadline:
                break
            if self._left and (now_s >= next_at_s or not self._running):
                next_at_s = now_s + HEAD_START_S
                self._begin()
                continue
            until_s = min(self._deadline, next_at_s) if self._left else self._deadline
            for key, _ in self._selector.select(until_s - now_s):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if self._has_connected(sock):
                    return self._won(sock)
        raise self._failed()

    def close(self) -> None:
        for sock in self._running:
            sock.close()
        self._selector.close()

    def _begin(self) -> None:
        place, family, address = self._left.popleft()
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._failures[place] = error
            return
        self._running[sock] = place
        self._selector.register(sock, selectors.EVENT_WRITE)
        try:
            sock.setblocking(False)
            problem = sock.connect_ex(address)
        except OSError as error:
            problem = error.errno or errno.EINVAL
        if problem not in (0, *_UNDER_WAY):
            self._lose(sock, problem)

    def _has_connected(self, sock: socket.socket) -> bool:
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._lose(sock, problem)
        return not problem

    def _lose(self, sock: socket.socket, problem: int) -> None:
        place = self._running.pop(sock)
        self._selector.unregister(sock)
        sock.close()
        known = self._failures.get(place)
        # That there is no IPv6 here tells less than what the other address said.
        if known is None or known.errno in _NO_WAY:
            self._failures[place] = OSError(problem, os.strerror(problem))

    def _won(self, sock: socket.socket) -> tuple[socket.socket, int]:
        self._selector.unregister(sock)
        place = self._running.pop(sock)
        sock.settimeout(self._timeout_s)
        return sock, place

    def _failed(self) -> ConnectError:
        late = TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        for place in self._running.values():
            self._failures[place] = late
        reasons = {place: each.strerror or str(each) for place, each in sorted(self._failures.items())}
        told = next(
            (each for each in self._failures.values() if each.errno not in _NO_WAY),
            next(iter(self._failures.values()), late),
        )
        return ConnectError(told.errno, told.strerror or str(told), reasons)


def _resolved(targets: Sequence[Target], failures: dict[int, OSError]) -> list[_Candidate]:
    """Every address of every target: the first of each target before the second of any, IPv6 first."""
    ranked: list[tuple[int, _Candidate]] = []
    for place, (host, port) in enumerate(targets):
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failures[place] = error
            continue
        except (UnicodeError, OverflowError) as error:
            failures[place] = OSError(errno.EINVAL, str(error))
            continue
        six = [each for each in found if each[0] == socket.AF_INET6]
        four = [each for each in found if each[0] == socket.AF_INET]
        for rank, each in enumerate(_alternating(six, four)):
            ranked.append((rank, (place, each[0], each[4])))
    return [candidate for _, candidate in sorted(ranked, key=lambda each: each[0])]


def _alternating(first: list[_Row], second: list[_Row]) -> list[_Row]:
    """One of each in turn: if one kind of address leads nowhere, the other's turn comes soon."""
    longest = max(len(first), len(second))
    return [row[at] for at in range(longest) for row in (first, second) if at < len(row)]
