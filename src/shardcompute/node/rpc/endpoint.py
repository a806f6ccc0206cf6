"""A node's place on the network: it listens for links, dials others, and knows who everybody is.

Both ends of every link show certificates of the cluster's authority; a peer that claims another's name, belongs to
another cluster or was revoked is refused before it can say anything. A link ends with the certificates that opened it;
those of a node can be renewed while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from urllib.parse import urlsplit

from shardcompute.core.errors import LinkClosedError, LinkError, ShardComputeError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.sockets.hosts import NEAR_HOSTS
from shardcompute.node.reach.own_addresses import own_addresses
from shardcompute.node.reach.reach import Reach
from shardcompute.node.reach.rungs import CALLBACK, RELAYED
from shardcompute.node.rpc.commands import Peer
from shardcompute.relay.client import RelayDoor
from shardcompute.relay.tunnel import DOORS
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
    Listener,
    Message,
    Transports,
    join_address,
)
from shardcompute.wire.socket_link import SocketLink, answer_link, open_link, wrap_answering
from shardcompute.wire.tcp import split_address, tune_socket

log = logging.getLogger(__name__)
OnLink = Callable[[Link], None]
"""Serves a link until it ends, in a thread of its own."""
# Fills long, lossy paths that others give up on; where the system lacks it, its own choice stays.
_CONGESTION = "bbr"
_LOOK_S = 60.0
_UNNAMED_S = 4.0


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
        self.reach: Reach | None = None
        """Ways to nodes that cannot be dialled; None on networks that are emulated, or within a process."""
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
        self._former: Listener | None = None
        self._listen_url = listen_url
        self._advertise = advertise
        self._reached: dict[str, str] = {}
        """Where nodes have answered, which counts for more than what is told of them."""
        self.url, self._near_url = _addresses(listen_url, self._listener.address, advertise)
        if transports.takes_sockets(listen_url):
            self.reach = Reach(self)
        self._thread = threading.Thread(target=self._accept_all, name="endpoint", daemon=True)
        self._expirer = threading.Thread(target=self._expire_all, name="endpoint expiry", daemon=True)

    @property
    def credentials(self) -> Credentials:
        with self._lock:
            return self._credentials

    def reached(self, node: str, url: str) -> None:
        """This node has answered at this address: that is where it is dialled from now on."""
        self._reached[node] = url

    def renew(self, credentials: Credentials) -> None:
        """Open links with this certificate from now on; those that are open stay so until the former one runs out."""
        credentials.show_in(self._tls)
        with self._lock:
            self._credentials = credentials

    def start(self) -> None:
        """Serve links; whoever dialled before has waited."""
        self._thread.start()
        self._expirer.start()

    def dial(
        self,
        url: str,
        role: str,
        node: str | None = None,
        *,
        needs: Role | None = None,
        only_direct: bool = False,
        timeout_s: float | None = None,
    ) -> Link:
        """A link to the node at `url`; LinkError unless it is `node`, and may act as `needs`, where they are named. A
        node that is named is reached in whatever way it can be (see `reach`), unless `only_direct`. An address has
        `timeout_s` to answer, None: as long as any."""
        url = self._reached.get(node or "", url)
        if node is None or only_direct or self.reach is None or url == self.url:
            link = self._dial_address(url, role, node, needs, timeout_s)
        else:
            link = self.reach.dial(url, role, node)
            self._check(link, node, needs)
        expires_at_s = min(read_peer(link.certificate).expires_at_s, self.credentials.own.expires_at_s)
        with self._lock:
            self._dialled[link] = expires_at_s
        self._look_at(expires_at_s)
        return link

    def _dial_address(
        self,
        url: str,
        role: str,
        node: str | None,
        needs: Role | None = None,
        timeout_s: float | None = None,
    ) -> Link:
        options = LinkOptions(tls=self.credentials.client_context(), congestion=_CONGESTION, node=node or "")
        if timeout_s is not None:
            options = replace(options, handshake_timeout_s=timeout_s)
        if url.startswith(DOORS):
            # The coordinator's own listener, behind the door of a relay beside it or one at which it waits.
            with RelayDoor(url, options.handshake_timeout_s) as door:
                sock = door.enter("links", options.handshake_timeout_s)
            entered = open_link(sock, url, url, self._hello(role), options)
            entered.rung = RELAYED
            link: Link = entered
        else:
            near = self._near_url if url == self.url else url
            link = self._transports.dial(near, self._hello(role), options)
        self._check(link, node, needs)
        return link

    def _check(self, link: Link, node: str | None, needs: Role | None = None) -> None:
        """LinkError, and the link closed, unless its certificate is this node's, for this role."""
        try:
            peer = read_peer(link.certificate)
            # What a node calls itself is only as good as its certificate.
            check_peer(peer, cluster=self.cluster, revocations=self.revocations, node_id=link.peer)
            check_peer(peer, cluster=self.cluster, revocations=self.revocations, node_id=node, role=needs)
        except ShardComputeError as error:
            link.close()
            raise LinkError(error.message, hint=error.hint) from error

    # Ways of the ladder (`reach.LinkMaker`)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others may dial us."""
        host, port = split_address(self._listen_url)[0], split_address(self.url)[1]
        return own_addresses(host, port, self.url)

    def check_role(self, role: str) -> None:
        if role not in self._roles:
            raise LinkError(f"this node does not serve links of role {role!r}")

    def dial_direct(self, url: str, role: str, node: str) -> Link:
        return self._dial_address(url, role, node)

    def open_over(self, sock: socket.socket, rung: str, role: str, node: str) -> SocketLink:
        try:
            options = LinkOptions(tls=self.credentials.client_context(), congestion=_CONGESTION, node=node)
        except BaseException:
            sock.close()
            raise
        tune_socket(sock, _CONGESTION)
        link = open_link(sock, f"{node} ({rung})", node, self._hello(role), options)
        link.rung = rung
        self._check(link, node)
        return link

    def answer_over(self, sock: socket.socket, rung: str, node: str | None, meeting: bytes) -> None:
        who, options = node or "a member", LinkOptions(tls=self._tls, congestion=_CONGESTION)
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: sock.close())
            tune_socket(sock, _CONGESTION)
            try:
                sock = wrap_answering(sock, options)
            except (OSError, ValueError) as error:
                raise LinkError(f"TLS with {who} failed: {error}") from error
            link = answer_link(sock, f"{who} ({rung})", self._hello(""), options, self._judge)
            link.rung = rung
            undo.pop_all()
        self._check(link, node)
        self._admit(
            link if self.reach is None or not meeting else self.reach.upgrades.answered(link, meeting)
        )

    def serve_callback(self, url: str, callback_role: str, role: str, node: str) -> None:
        link = self._dial_address(url, callback_role, node)
        if isinstance(link, SocketLink):
            link.turn_round(role, CALLBACK)
            self._admit(link)
        else:
            link.close()

    def dialler(self, role: str) -> Callable[[Peer], Link]:
        """Dials peers in this role; LinkError where another node answers."""
        return lambda peer: (
            self.dial(peer.url, role, peer.node)
            if peer.node
            else self.dial(peer.url, role, needs=Role.WORKER, timeout_s=_UNNAMED_S)
        )

    def heed(self, revocations: Revocations) -> None:
        """Refuse these nodes from now on and end every open link to and from them."""
        self.revocations = self.revocations.merged(revocations)
        with self._lock:
            links = [link for link in (*self._links, *self._dialled) if self._is_revoked(link)]
        for link in links:
            link.close()

    def move(self, host: str) -> None:
        """Listen at this address from now on, at the same port if it is free there. All links that are open end: they
        began at an address that is gone. Where it was, the endpoint still answers until `arrived`: a refusal there
        would be taken for the end of its process. LinkError, and nothing changed, where that cannot be."""
        port = split_address(self.url)[1]
        options = LinkOptions(tls=self._tls, congestion=_CONGESTION)
        try:
            listener = self._transports.listen(
                join_address(host, port), self._hello(""), options, self._judge
            )
        except LinkError:
            listener = self._transports.listen(join_address(host, 0), self._hello(""), options, self._judge)
        with self._lock:
            if self._is_closing:
                listener.close()
                return
            former, self._former, self._listener = self._former, self._listener, listener
            self._listen_url = join_address(host, split_address(listener.address)[1])
            links = [*self._links, *self._dialled]
        self.url, self._near_url = _addresses(self._listen_url, listener.address, self._advertise)
        if former is not None:
            former.close()
        for link in links:
            with contextlib.suppress(LinkError):
                link.close()

    def arrived(self) -> None:
        """The cluster knows where this endpoint is now: nobody is answered where it was."""
        with self._lock:
            former, self._former = self._former, None
        if former is not None:
            former.close()

    def close(self) -> None:
        """Stop listening and end every link that others dialled."""
        with self._lock:
            self._is_closing = True
            links = list(self._links)
        self._woken.set()
        self.arrived()
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
        reach = self.reach
        is_wanted = hello.role in self._roles or (
            reach is not None
            and (
                reach.callbacks.is_expected(hello.role, hello.node)
                or reach.upgrades.is_expected(hello.role, hello.node)
            )
        )
        return None if is_wanted else f"this node does not serve links of role {hello.role!r}"

    def _accept_all(self) -> None:
        while True:
            listener = self._listener
            try:
                link = listener.accept()
            except LinkClosedError:
                if listener is not self._listener:
                    continue
                return
            if self.reach is None or not self.reach.callbacks.take(link):
                self._admit(link)

    def _admit(self, link: Link) -> None:
        """Serve a link that a peer dialled, or had us dial, unless it is a better way for one that is served."""
        if self.reach is not None and self.reach.upgrades.take(link):
            return
        expires_at_s = min(read_peer(link.certificate).expires_at_s, self.credentials.own.expires_at_s)
        with self._lock:
            is_closing = self._is_closing
            if not is_closing:
                self._links[link] = expires_at_s
        if is_closing:
            link.close()
            return
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
    return join_address(advertise or host, port), join_address(NEAR_HOSTS.get(host, host), port)
