"""A node's place on the network: it listens for links, dials others, and knows who everybody is.

Both ends of every link show certificates of the cluster's authority; a peer that claims another's name, belongs to
another cluster or was revoked is refused before it can say anything. A link ends with the certificates that opened it;
those of a node can be renewed while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from math import inf
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
_LOOK_S = 60.0
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is that of certificates, in seconds since 1970."""
        self._credentials = credentials
        self._clock = clock
        self._roles = dict(roles)
        self._lock = threading.Lock()
        self._limited_log = RateLimitedLog(log)
        self._links: dict[Link, float] = {}
        self._dialled: weakref.WeakKeyDictionary[Link, float] = weakref.WeakKeyDictionary()
        """All that are open, with when the certificates that opened them run out."""
        self._look_at_s = inf
        self._woken = threading.Event()
        self._is_closing = False
        self.revocations = Revocations()
        self.node = credentials.identity.node_id
        self.cluster = credentials.own.cluster
        self._transports = transports
        self._tls = credentials.server_context()
        self._listener = transports.listen(
            listen_url,
            self._hello(""),
            LinkOptions(tls=self._tls, congestion=_CONGESTION),
            self._judge,
        )
        self.url, self._near_url = _addresses(listen_url, self._listener.address, advertise)
        self._thread = threading.Thread(target=self._accept_all, name="endpoint", daemon=True)
        self._expirer = threading.Thread(target=self._expire_all, name="endpoint expiry", daemon=True)

    @property
    def credentials(self) -> Credentials:
        with self._lock:
            return self._credentials

    def renew(self, credentials: Credentials) -> None:
        """Open links with this certificate from now on; those that are open stay so until the former one runs out."""
        credentials.show_in(self._tls)
        with self._lock:
            self._credentials = credentials

    def start(self) -> None:
        """Serve links; whoever dialled before has waited."""
        self._thread.start()
        self._expirer.start()

    def dial(self, url: str, role: str, node: str | None = None, *, needs: Role | None = None) -> Link:
        """A link to the node at `url`; LinkError unless it is `node`, and may act as `needs`, where they are named."""
        credentials = self.credentials
        options = LinkOptions(tls=credentials.client_context(), congestion=_CONGESTION, node=node or "")
        link = self._transports.dial(self._near_url if url == self.url else url, self._hello(role), options)
        try:
            peer = read_peer(link.certificate)
            # What a node calls itself is only as good as its certificate.
            check_peer(peer, cluster=self.cluster, revocations=self.revocations, node_id=link.peer)
            check_peer(peer, cluster=self.cluster, revocations=self.revocations, node_id=node, role=needs)
        except ShardComputeError as error:
            link.close()
            raise LinkError(error.message, hint=error.hint) from error
        expires_at_s = min(peer.expires_at_s, credentials.own.expires_at_s)
        with self._lock:
            self._dialled[link] = expires_at_s
        self._look_at(expires_at_s)
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
        self._woken.set()
        self._listener.close()
        for link in links:
            link.close()
        for thread in (self._thread, self._expirer):
            if thread.ident is not None:
                thread.join()

    def expire_links(self) -> None:
        """End every link of which a certificate that opened it has run out."""
        now_s = self._clock()
        with self._lock:
            expired = [link for link, at_s in (*self._links.items(), *self._dialled.items()) if at_s <= now_s]
            for link in expired:
                self._dialled.pop(link, None)
        for link in expired:
            log.info("the link with %s ends with the certificate that opened it", link.peer)
            link.close()

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
            expires_at_s = min(read_peer(link.certificate).expires_at_s, self.credentials.own.expires_at_s)
            with self._lock:
                if self._is_closing:
                    link.close()
                    return
                self._links[link] = expires_at_s
            self._look_at(expires_at_s)
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
                self._links.pop(link, None)

    def _look_at(self, at_s: float) -> None:
        """Some link ends then."""
        if at_s < self._look_at_s:
            self._woken.set()

    def _expire_all(self) -> None:
        while True:
            with self._lock:
                if self._is_closing:
                    return
                # Not in one long wait: clocks are set, and machines sleep.
                soonest_s = min((*self._links.values(), *self._dialled.values()), default=inf)
                self._look_at_s = soonest_s
                self._woken.clear()
            self._woken.wait(min(max(soonest_s - self._clock(), 0.0), _LOOK_S))
            self.expire_links()


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
