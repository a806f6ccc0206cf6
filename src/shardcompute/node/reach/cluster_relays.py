"""The relays of a cluster, at its coordinator: the one in this process, others that were named, and tickets for all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardcompute.core.closing import Closing
from shardcompute.relay.door_tls import throwaway_server_context
from shardcompute.relay.server import RelayServer, RelayView
from shardcompute.relay.tickets import issue_ticket
from shardcompute.relay.tunnel import check_relay_url, door_url
from shardcompute.security.authority import ClusterAuthority
from shardcompute.security.certificates import PeerIdentity
from shardcompute.wire import join_address
from shardcompute.wire.control import RelayAccess


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """`port`: of the relay in the coordinator's process, 0 for any free one, None for none. `others`: relays elsewhere,
    each by its doors, the one to prefer first."""

    port: int | None = None
    others: tuple[tuple[str, ...], ...] = ()


class ClusterRelays(Closing):
    """Closing it ends the relay in this process."""

    def __init__(
        self,
        authority: ClusterAuthority,
        options: RelayOptions,
        *,
        host: str,
        advertise: Sequence[str],
        entries: Mapping[str, tuple[str, int]],
    ) -> None:
        """`advertise`: the hosts by which members reach this process, those to prefer first."""
        self._authority = authority
        self._others = tuple(tuple(map(check_relay_url, doors)) for doors in options.others)
        self._server: RelayServer | None = None
        self._own: tuple[str, ...] = ()
        if options.port is not None:
            key = authority.private_key.public_key().public_bytes_raw()
            tls = throwaway_server_context()
            self._server = RelayServer(host, options.port, key, entries=entries, tls=tls)
            urls = [join_address(each, self._server.port) for each in advertise]
            # The same port speaks WebSocket, for networks that let only the web out.
            self._own = tuple(door for url in urls for door in (url, url.replace("tcp://", "wss://")))

    @property
    def port(self) -> int | None:
        """Of the relay in this process."""
        return None if self._server is None else self._server.port

    @property
    def urls(self) -> Sequence[Sequence[str]]:
        return (self._own, *self._others) if self._own else self._others

    @property
    def others(self) -> Sequence[Sequence[str]]:
        """Those elsewhere, each by its doors."""
        return self._others

    @property
    def doors(self) -> Sequence[str]:
        """By which a node reaches this process that can open nothing but the web, or cannot dial it."""
        web = [url for url in self._own if url.startswith("wss://")]
        return (*web, *(door_url(url) for doors in self._others for url in doors))

    def view(self) -> RelayView | None:
        return None if self._server is None else self._server.view()

    def grant(self, peer: PeerIdentity) -> RelayAccess | None:
        """What a member gets that has shown its certificate; None where there are no relays."""
        if not self.urls:
            return None
        ticket = issue_ticket(self._authority, peer.public_key, now_s=time.time())
        return RelayAccess(ticket, tuple(tuple(doors) for doors in self.urls))

    def attend_as(self, coordinator: PeerIdentity) -> bytes:
        """A ticket for the coordinator itself, to which relays lead whoever enters."""
        return issue_ticket(self._authority, coordinator.public_key, now_s=time.time(), attends=True)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
