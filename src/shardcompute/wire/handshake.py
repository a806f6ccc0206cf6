"""The first messages on every link: who are you, and which version do we speak?

The side that dialled says `Hello`; the other answers `Welcome` with the highest version that both know, or
`Refused` with the reason. Until then a peer gets the small `HANDSHAKE_LIMITS` and a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardcompute.core.errors import LinkError
from shardcompute.core.fields import shorten
from shardcompute.wire.framing import Body
from shardcompute.wire.links import Admit
from shardcompute.wire.messages import Hello, Message, Refused, Welcome


class Exchange(Protocol):
    """The part of a link that introductions need."""

    @property
    def address(self) -> str: ...

    @property
    def certificate(self) -> bytes | None: ...

    def send(self, message: Message, body: Body = ()) -> None: ...

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]: ...


@dataclass(frozen=True, slots=True)
class Introduction:
    """What an introduction settles."""

    peer: str
    role: str
    version: int


def negotiate(theirs: Hello, ours: Hello) -> Welcome | Refused:
    """Our answer to `theirs`: one cluster, and the highest version that both speak."""
    if theirs.cluster != ours.cluster:
        return Refused(shorten(f"this node belongs to cluster {ours.cluster!r}, not {theirs.cluster!r}"))
    version = min(theirs.version_max, ours.version_max)
    if version < max(theirs.version_min, ours.version_min):
        return Refused(
            f"this node speaks protocol versions {ours.version_min} to {ours.version_max}, "
            f"not {theirs.version_min} to {theirs.version_max}"
        )
    return Welcome(version, ours.node)


def introduce(link: Exchange, ours: Hello, timeout_s: float) -> Introduction:
    """Say who we are and read the answer. `LinkError` if we are refused."""
    link.send(ours)
    return read_answer(link, ours, timeout_s)


def read_answer(link: Exchange, ours: Hello, timeout_s: float) -> Introduction:
    """The second half of `introduce`."""
    reply = _receive(link, timeout_s)
    if isinstance(reply, Refused):
        raise LinkError(
            f"{link.address} refuses the link: {reply.reason}",
            hint="run the same release on every node and join with a token of this cluster",
        )
    if not isinstance(reply, Welcome):
        raise LinkError(f"{link.address} answers a greeting with {type(reply).__name__}")
    if not ours.version_min <= reply.version <= ours.version_max:
        raise LinkError(f"{link.address} chose protocol version {reply.version}, which was not offered")
    return Introduction(reply.node, "", reply.version)


def answer(link: Exchange, ours: Hello, admit: Admit | None, timeout_s: float) -> Introduction:
    """Hear who dialled and answer. `LinkError` if we refuse, after the peer was told why."""
    hello = _receive(link, timeout_s)
    if not isinstance(hello, Hello):
        raise LinkError(f"{link.address} began with {type(hello).__name__} instead of a greeting")
    reply = negotiate(hello, ours)
    reason = admit(hello, link.certificate) if admit and isinstance(reply, Welcome) else None
    if reason is not None:
        reply = Refused(shorten(reason))
    link.send(reply)
    if isinstance(reply, Refused):
        raise LinkError(f"{hello.node!r} at {link.address} was refused: {reply.reason}")
    return Introduction(hello.node, hello.role, reply.version)


def _receive(link: Exchange, timeout_s: float) -> Message:
    try:
        return link.receive(timeout_s)[0]
    except TimeoutError as error:
        raise LinkError(
            f"{link.address} did not introduce itself within {timeout_s:g} s",
            hint="check that the address is a ShardCompute node's and that both sides use TLS or neither",
        ) from error
