"""Links: two-way connections that carry messages, whatever lies beneath.

Three small protocols: a `Transport` dials and listens, a `Listener` accepts, a `Link` sends and receives. A
URL's scheme chooses the transport (`wire.transports`). A link that was dialled or accepted has been
introduced: both sides know each other's name and speak the same version of the protocol.

Errors: `LinkClosedError` once the connection has ended, whoever ended it; `LinkError` when the peer cannot be
reached, breaks the protocol or is too slow. After any of them the link is of no more use, except for a
message of ours that `send` refuses because it breaks the limits: then nothing was sent.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from shardcompute.wire.framing import Body
from shardcompute.wire.limits import WireLimits
from shardcompute.wire.messages import Hello, Message

Admit: TypeAlias = Callable[[Hello, bytes | None], str | None]
"""Judges a peer by what it says of itself and its TLS certificate (DER): a reason to refuse it, or None."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How to dial or listen.

    `tls` is a client's context to dial with, a server's to listen with; None sends in the clear.
    `server_name` is the name that the peer's certificate must bear, the URL's host unless given. A frame that
    has begun must be through after `frame_timeout_s` plus its size at `slowest_bytes_per_s`, in either
    direction. `max_pending` bounds a listener's connections that are not yet introduced and accepted.
    `congestion` names the TCP congestion control to ask for; where the system does not allow it, its own
    default stays. `node` is whom a dialler wants to reach, where it knows: one on the same machine can be reached a
    shorter way (see `local_sockets`).
    """

    limits: WireLimits = field(default_factory=WireLimits)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    handshake_timeout_s: float = 10.0
    frame_timeout_s: float = 30.0
    slowest_bytes_per_s: float = 64 * 1024.0
    max_pending: int = 64
    congestion: str | None = None
    node: str = ""


DEFAULT_OPTIONS = LinkOptions()
DIRECT = "direct"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What a link has moved so far, without TLS's own bytes; what congestion control and TLS are in force, and whether
    it stays on this machine (see `local_sockets`). `rung` is the way on which it goes (`node.reach.rungs`)."""

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    congestion: str | None = None
    tls_version: str | None = None
    is_local: bool = False
    rung: str = DIRECT
    remark: str = ""
    """Why a better way failed."""


class Link(Protocol):
    @property
    def peer(self) -> str:
        """The node at the other end, by its own word; check `certificate` where that matters."""

    @property
    def role(self) -> str:
        """The role in which the peer dialled us; "" where we dialled it."""

    @property
    def version(self) -> int:
        """The version of the protocol that both sides agreed on."""

    @property
    def address(self) -> str:
        """The other end's URL, for people to read."""

    @property
    def certificate(self) -> bytes | None:
        """The peer's TLS certificate (DER), or None where it showed none."""

    @property
    def stats(self) -> LinkStats: ...

    def send(self, message: Message, body: Body = ()) -> None:
        """Send one frame. Any thread may call it; it blocks while the other side is slow to read."""

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]:
        """The next frame; the body is the caller's own. One thread at a time receives.

        `TimeoutError` if no frame has begun after `timeout_s`; that alone leaves the link usable.
        """

    def close(self) -> None:
        """End the connection and wake whoever is blocked in `send` or `receive`. Any thread, any number of
        times."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Listener(Protocol):
    @property
    def address(self) -> str:
        """The URL to dial, with the port that was bound."""

    def accept(self, timeout_s: float | None = None) -> Link:
        """The next introduced link. `TimeoutError` after `timeout_s`, `LinkClosedError` once closed."""

    def close(self) -> None:
        """Stop listening and drop what was not accepted; accepted links live on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Transport(Protocol):
    def dial(self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS) -> Link:
        """Connect to `url` and introduce ourselves."""

    def listen(
        self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS, admit: Admit | None = None
    ) -> Listener:
        """Answer whoever dials `url`; `ours.role` goes unused. Refuses other clusters, other versions, and
        whom `admit` refuses."""
