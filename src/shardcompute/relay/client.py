"""A member at a relay's door: learn how the relay sees us, meet a peer, or enter a server beside the relay."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass

from shardcompute.core.errors import LinkError
from shardcompute.relay.messages import (
    LENGTH,
    PREAMBLE,
    AwaitVisitor,
    Challenge,
    Declined,
    DoorMessage,
    Enter,
    Meet,
    Meeting,
    Spliced,
    attendance_of,
    check_length,
    pack,
    pack_meeting,
    unpack,
)
from shardcompute.relay.tickets import prove_ticket
from shardcompute.relay.tunnel import connect_relay
from shardcompute.security.identity import NodeIdentity

_HINT = "check the relay's address and that it is running"


@dataclass(frozen=True, slots=True)
class RelayPass:
    """What a member shows at a relay."""

    identity: NodeIdentity
    ticket: bytes


class RelayDoor:
    """A connection at a relay's door, after its challenge. Leaving the block closes it unless `meet` or `enter` has
    given it away."""

    def __init__(self, url: str, timeout_s: float, *, source: tuple[str, int] | None = None) -> None:
        """`source`: come from this address and port. Raises `LinkError`."""
        self.url = url
        self._deadline = time.monotonic() + timeout_s
        began_s = time.monotonic()
        self._sock: socket.socket | None = connect_relay(url, timeout_s, source=source)
        try:
            self._send(PREAMBLE)
            challenge = self._receive()
            if not isinstance(challenge, Challenge):
                raise LinkError(f"{url} greets with {type(challenge).__name__}", hint=_HINT)
            self.local: tuple[str, int] = self._socket().getsockname()[:2]
        except OSError as error:
            self.close()
            raise self._lost(error) from error
        except BaseException:
            self.close()
            raise
        self._nonce = challenge.nonce
        self.seen = (challenge.host, challenge.port)
        """Where the relay sees us: behind a router, the router's own address and a port that it has chosen."""
        self.took_s = time.monotonic() - began_s

    def meet(self, shown: RelayPass, meeting: bytes, peer: str, timeout_s: float) -> socket.socket:
        """The socket on which `peer` is at the other end, once it has come. `LinkError` where it does not, or the relay
        will not have us."""
        request = pack_meeting(Meeting(meeting, peer))
        proof = prove_ticket(shown.identity, self._nonce, request)
        return self._splice(Meet(shown.ticket, request, proof), timeout_s)

    def enter(self, entry: str, timeout_s: float) -> socket.socket:
        """The socket on which a server beside the relay is at the other end. Raises `LinkError`."""
        return self._splice(Enter(entry), timeout_s)

    def attend(self, shown: RelayPass, entry: str, timeout_s: float) -> socket.socket:
        """The socket on which somebody is at the other end who wants to enter, once one has come. Raises `LinkError`;
        `hang_up` in another thread ends the wait."""
        proof = prove_ticket(shown.identity, self._nonce, attendance_of(entry))
        return self._splice(AwaitVisitor(shown.ticket, entry, proof), timeout_s)

    def hang_up(self) -> None:
        """Wake whoever waits here, in whatever thread; it is theirs to close."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    def __enter__(self) -> RelayDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _splice(self, request: DoorMessage, timeout_s: float) -> socket.socket:
        self._deadline = time.monotonic() + timeout_s
        self._send(pack(request))
        answer = self._receive()
        if isinstance(answer, Declined):
            raise LinkError(f"the relay {self.url} declines: {answer.reason}", hint=answer.hint)
        if not isinstance(answer, Spliced):
            raise LinkError(f"the relay {self.url} answers with {type(answer).__name__}", hint=_HINT)
        sock = self._socket()
        self._sock = None
        sock.settimeout(None)
        return sock

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise LinkError("this connection to a relay is closed")
        return self._sock

    def _send(self, data: bytes) -> None:
        sock = self._socket()
        try:
            sock.settimeout(self._left_s())
            sock.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self) -> DoorMessage:
        return unpack(self._take(check_length(self._take(LENGTH.size))))

    def _take(self, count: int) -> bytes:
        sock, data = self._socket(), b""
        while len(data) < count:
            try:
                sock.settimeout(self._left_s())
                # Not a byte more: what follows is the peer's.
                more = sock.recv(count - len(data))
            except OSError as error:
                raise self._lost(error) from error
            if not more:
                raise LinkError(f"the relay {self.url} hung up", hint=_HINT)
            data += more
        return data

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _lost(self, error: OSError) -> LinkError:
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return LinkError(f"the relay {self.url} cannot be used: {why}", hint=_HINT)
