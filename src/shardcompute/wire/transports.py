"""Which transport a URL's scheme stands for."""

from __future__ import annotations

from collections.abc import Mapping

from shardcompute.core.errors import UsageError
from shardcompute.wire.inproc import InprocTransport
from shardcompute.wire.links import DEFAULT_OPTIONS, Admit, Link, LinkOptions, Listener, Transport
from shardcompute.wire.local_sockets import default_local_sockets
from shardcompute.wire.messages import Hello
from shardcompute.wire.tcp import TcpTransport


class Transports:
    """Transports by scheme; itself a `Transport` that leaves each URL to the one it names."""

    def __init__(self, by_scheme: Mapping[str, Transport]) -> None:
        self._by_scheme = dict(by_scheme)

    def dial(self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS) -> Link:
        return self._find(url).dial(url, ours, options)

    def listen(
        self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS, admit: Admit | None = None
    ) -> Listener:
        return self._find(url).listen(url, ours, options, admit)

    def takes_sockets(self, url: str) -> bool:
        """Whether links of this scheme are the system's own TCP: a connection made in another way is as good then."""
        return isinstance(self._find(url), TcpTransport)

    def _find(self, url: str) -> Transport:
        scheme, separator, _ = url.partition("://")
        transport = self._by_scheme.get(scheme.lower()) if separator else None
        if transport is None:
            known = ", ".join(f"{known}://" for known in sorted(self._by_scheme))
            raise UsageError(f"{url!r} cannot be linked to: no known scheme", hint=f"use one of {known}")
        return transport


def default_transports() -> Transports:
    """Every transport of this release, with `inproc` names of its own."""
    return Transports({"inproc": InprocTransport(), "tcp": TcpTransport(default_local_sockets())})
