"""Peer links that a stage sends on: one to each peer, whichever chains use it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence

from shardcompute.core.errors import LinkError
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.worker.codec_choice import LinkPace
from shardcompute.wire import Link, LinkPump, Message, choose_warmth

log = logging.getLogger(__name__)


class PeerLinks:
    """Methods may be called from any thread. `on_broken` hears of links that ended without our doing."""

    def __init__(self, dial: Callable[[Peer], Link], on_broken: Callable[[str], None]) -> None:
        self._dial = dial
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._pumps: dict[str, LinkPump] = {}
        self._paces: dict[str, LinkPace] = {}
        self._is_closed = False

    def open(self, to: Peer) -> LinkPump:
        """The link to a peer, dialled where there is none. Raises LinkError."""
        with self._lock:
            known = self._pumps.get(to.url)
        if known is not None:
            return known
        started = time.monotonic()
        try:
            link = self._dial(to)
        except LinkError:
            self._on_broken(to.node)
            raise
        pace = LinkPace()
        pump: LinkPump = LinkPump(
            link,
            _ignore,
            lambda error: self._lost(to, pump, error),
            on_sent=pace.saw,
            warmth=choose_warmth(time.monotonic() - started, link.stats.congestion),
        )
        with self._lock:
            # Somebody else may have dialled at the same time, or closed us.
            kept = None if self._is_closed else self._pumps.setdefault(to.url, pump)
            if kept is pump:
                self._paces[to.url] = pace
                pump.start()
        if kept is not pump:
            link.close()
        if kept is None:
            raise LinkError("this node is closing")
        return kept

    def send(self, to: Peer, message: Message, body: Sequence[memoryview] = ()) -> None:
        """Send over a link that is open, waiting for room: dialling is not for the thread that computes.

        Raises LinkError where there is none; that it ended has been reported.
        """
        with self._lock:
            pump = self._pumps.get(to.url)
        if pump is None:
            raise LinkError(f"there is no link to {to.node}")
        pump.offer(message, tuple(body), timeout_s=None)

    def bytes_per_s(self, to: Peer) -> float | None:
        """What the link to a peer carries, as far as sending has shown; None where it has not."""
        with self._lock:
            pace = self._paces.get(to.url)
        return None if pace is None else pace.bytes_per_s

    def backlog(self, to: Peer) -> int:
        """Frames that wait to go out to a peer."""
        with self._lock:
            pump = self._pumps.get(to.url)
        return 0 if pump is None else pump.backlog

    def end(self, node: str) -> bool:
        """End the links to a node, as if they had broken; False where there is none."""
        with self._lock:
            pumps = [pump for pump in self._pumps.values() if pump.link.peer == node]
        for pump in pumps:
            pump.close()
        return bool(pumps)

    def has(self, to: Peer) -> bool:
        with self._lock:
            return to.url in self._pumps

    def keep_only(self, urls: Container[str]) -> None:
        """Close the links to everybody else, and so wake whoever waits to send to them."""
        with self._lock:
            others = [self._pumps.pop(url) for url in list(self._pumps) if url not in urls]
            self._paces = {url: pace for url, pace in self._paces.items() if url in self._pumps}
        for pump in others:
            pump.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self.keep_only(())

    def _lost(self, to: Peer, pump: LinkPump, error: LinkError) -> None:
        with self._lock:
            if self._pumps.get(to.url) is not pump:
                return
            del self._pumps[to.url], self._paces[to.url]
        log.info("the link to %s ended: %s", to.node, error)
        self._on_broken(to.node)


def _ignore(message: Message, body: memoryview) -> None:
    """Nobody has anything to say on a link that we dialled to send frames."""
