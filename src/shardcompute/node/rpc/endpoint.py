"""A node's place on the network: it listens for links, dials others, and knows who everybody is.

Both ends of every link show certificates of the cluster's authority; a peer that claims another's name, belongs to
another cluster or was revoked is refused before it can say anything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from shardcompute.core.errors import LinkClosedError, LinkError, ShardComputeError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.node.rpc.commands import Peer
from shardcompute.security.certificates import check_peer, read_peer
from shardcompute.security.credentials import Credentials
from shardcompute.security.names import Role
from shardcompute.security.revocations import Revocations
from shardcompute.wire import (
    VERSION_MAX,
    VERSION_MIN,
    Hello,
    Link,
    LinkOptions,
    Message,
    Transports,
    join_address,
)

log = logging.getLogger(__name__)
OnLink = Callable[[Link], None]
"""Serves a link until it ends, in a thread of its own."""
# Fills long, lossy paths that others give up on; where the system lacks it, its own choice stays.
_CONGESTION = "bbr"
_NEAR = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Endpoint:
    """Listens at a URL, whose scheme names one of its transports, and serves links by the role in which they were
    dialled. Others reach it at `url`, with `advertise` for a host where that is given."""

    def __init__(
        self,
        credentials: Credentials,
        listen_url: str,
        roles: Mapping[str, OnLink],
        *,
        transports: Transports,
        advertise: str = "",
    ) -> None:
        self._credentials = credentials
        self._roles = dict(roles)
        self._lock = threading.Lock()
        self._limited_log = RateLimitedLog(log)
        self._links: set[Link] = set()
        self._dialled: weakref.WeakSet[Link] = weakref.WeakSet()
        self._is_closing = False
        self.revocations = Revocations()
        self.node = credentials.identity.node_id
        self.cluster = credentials.own.cluster
        self._transports = transports
        self._listener = transports.listen(
            listen_url,
            self._hello(""),
            LinkOptions(tls=credentials.server_context(), congestion=_CONGESTION),
            self._judge,
        )
        self.url, self._near_url = _addresses(listen_url, self._listener.address, advertise)
        self._thread = threading.Thread(target=self._accept_all, name="endpoint", daemon=True)

    def start(self) -> None:
        """Serve links; whoever dialled before has waited."""
        self._thread.start()

    def dial(self, url: str, role: str, node: str | None = None, *, needs: Role | None = None) -> Link:
        """A link to the node at `url`; LinkError unless it is `node`, and may act as `needs`, where they are named."""
        options = LinkOptions(tls=self._credentials.client_context(), congestion=_CONGESTION)
        link = self._transports.dial(self._near_url if url == self.url else url, self._hello(role), options)
        try:
            peer = read_peer(link.certificate)
            # What a node calls itself is only as good as its certificate.
            check_peer(peer, cluster=self.cluster, revocations=self.revocations, node_id=link.peer)
            check_peer(peer, cluster=self.cluster, revocations=self.revocations, node_id=node, role=needs)
        except ShardComputeError as error:
            link.close()
            raise LinkError(error.message, hint=error.hint) from error
        with self._lock:
            self._dialled.add(link)
        return link

    def dialler(self, role: str) -> Callable[[Peer], Link]:
        """Dials peers in this role; LinkError where another node answers."""
        return lambda peer: self.dial(peer.url, role, peer.node)

    def heed(self, revocations: Revocations) -> None:
        """Refuse these nodes from now on and end every open link to and from them."""
        self.revocations = self.revocations.merged(revocations)
        with self._lock:
            links = [link for link in (*self._links, *self._dialled) if self._is_revoked(link)]
        for link in links:
            link.close()

    def close(self) -> None:
        """Stop listening and end every link that others dialled."""
        with self._lock:
            self._is_closing = True
            links = list(self._links)
        self._listener.close()
        for link in links:
            link.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _hello(self, role: str) -> Hello:
        return Hello(VERSION_MIN, VERSION_MAX, self.node, role, self.cluster)

    def _judge(self, hello: Hello, certificate: bytes | None) -> str | None:
        try:
            peer = read_peer(certificate)
            check_peer(peer, cluster=self.cluster, revocations=self.revocations, node_id=hello.node)
        except ShardComputeError as error:
            return error.message
        return None if hello.role in self._roles else f"this node does not serve links of role {hello.role!r}"

    def _accept_all(self) -> None:
        while True:
            try:
                link = self._listener.accept()
            except LinkClosedError:
                return
            with self._lock:
                if self._is_closing:
                    link.close()
                    return
                self._links.add(link)
            name = f"{link.role} of {link.peer}"
            threading.Thread(target=self._serve, args=(link,), name=name, daemon=True).start()

    def _is_revoked(self, link: Link) -> bool:
        return self.revocations.covers(link.peer)

    def _serve(self, link: Link) -> None:
        try:
            # The news may have come between its introduction and now.
            if self._is_revoked(link):
                return
            self._roles[link.role](link)
        except LinkError as error:
            self._limited_log.info(link.peer, "the link from %s ended: %s", link.peer, error.message)
        except Exception:
            log.exception("serving the link from %s failed", link.peer)
        finally:
            with contextlib.suppress(LinkError):
                link.close()
            with self._lock:
                self._links.discard(link)


def receive_all(link: Link, take: Callable[[Message, memoryview, str], None]) -> None:
    """Give every message of a link to `take`, with the node that sent it, until the link ends."""
    while True:
        message, body = link.receive()
        take(message, body, link.peer)


def _addresses(listen_url: str, bound_url: str, advertise: str) -> tuple[str, str]:
    """Where others dial us, and where we dial ourselves: a machine's router may not know the way back to it."""
    port, host = urlsplit(bound_url).port, urlsplit(listen_url).hostname
    if port is None or host is None:
        return bound_url, bound_url
    return join_address(advertise or host, port), join_address(_NEAR.get(host, host), port)
