"""Reach: a link to a node, on the best way that there is to it.

A node is first dialled where it says that it can be. If that does not succeed at once, the two find each other through
their coordinator, to which both hold a link anyway: each says where it can be dialled, from which outer port it will
dial at the same time, and which relays it reaches. Then all ways are tried side by side, better ones with a head start;
the first that ends in an introduced link with the right certificate wins. Whatever the way, the link is the same mutual
TLS between the two.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.node.reach.callbacks import Callbacks
from shardcompute.node.reach.offers import MeetAnswer, MeetOffer, decode_said, encode_said
from shardcompute.node.reach.punch import PunchPort
from shardcompute.node.reach.race import Race
from shardcompute.node.reach.relays import RelayBook, in_background
from shardcompute.node.reach.rungs import CALLBACK, DIRECT, PUNCHED, RELAYED
from shardcompute.node.reach.switching_link import SwitchingLink
from shardcompute.node.reach.upgrades import Upgrades
from shardcompute.relay.client import RelayPass
from shardcompute.relay.messages import MEETING_BYTES
from shardcompute.wire import Link
from shardcompute.wire.socket_link import SocketLink

log = logging.getLogger(__name__)
HEAD_START_S = 0.3
"""So long a node is only dialled where it says that it can be."""
_RELAY_AFTER_S = 0.3
_NEXT_RELAY_S = 0.5
_OBSERVE_S = 1.0
_TOTAL_S = 9.0
_MEET_S = 8.0
_CALLBACK_S = 4.0
_UPGRADE_S = 5.0
_REMEMBER_S = 120.0
_MOST_MEETINGS = 32
_MOST_REMEMBERED = 1024
Rendezvous = Callable[[str, bytes], bytes]
"""Carries an offer to a node, and its answer back. Raises LinkError."""


class LinkMaker(Protocol):
    """The endpoint, as the ladder sees it. All raise LinkError."""

    def dial_direct(self, url: str, role: str, node: str) -> Link:
        """Dial an address, where this node is expected."""

    def open_over(self, sock: socket.socket, rung: str, role: str, node: str) -> SocketLink:
        """The dialling side of a link over a connection that was made in another way; closes it if that fails."""

    def answer_over(self, sock: socket.socket, rung: str, node: str | None, meeting: bytes) -> None:
        """The answering side, which is then served like any link that was dialled to us, by `node` if that is known;
        with a `meeting`, it may move to a better way later."""

    def serve_callback(self, url: str, callback_role: str, role: str, node: str) -> None:
        """Dial the node that wants us, and serve that link as if it had dialled us in this role."""

    def check_role(self, role: str) -> None:
        """LinkError unless links of this role are served here."""

    @property
    def addresses(self) -> Sequence[str]:
        """Where we can be dialled."""


class Reach:
    """Of one endpoint. Methods may be called from any thread."""

    def __init__(self, maker: LinkMaker) -> None:
        self._maker = maker
        self._rendezvous: Rendezvous | None = None
        self.relays = RelayBook()
        self.callbacks = Callbacks()
        self.upgrades = Upgrades(self._redial)
        self._meetings = threading.Semaphore(_MOST_MEETINGS)
        self._lock = threading.Lock()
        self._detours: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """Nodes that could not be dialled where they say: when that was, and which rung it came to."""

    def meet_through(self, rendezvous: Rendezvous) -> None:
        """From now on nodes can be met."""
        self._rendezvous = rendezvous

    def learn(self, shown: RelayPass, relays: Sequence[Sequence[str]]) -> None:
        self.relays.learn(shown, relays)

    def dial(self, url: str, role: str, node: str) -> Link:
        """A link to this node, whose address is probably `url`. Raises LinkError, which says why each way failed."""
        race = Race(node, _TOTAL_S, _close)
        race.start(DIRECT, lambda: self._maker.dial_direct(url, role, node))
        link = race.wait(0.0 if self._detour(node) else HEAD_START_S)
        if link is None and self._rendezvous is not None:
            race.start("meeting", lambda: self._meet(race, url, role, node))
        link = race.finish()
        rung = link.stats.rung
        if rung not in (DIRECT, "local"):
            why = "; ".join(f"{name}: {error.message}" for name, error in race.failures.items())
            if isinstance(link, SocketLink | SwitchingLink):
                link.remark = why
            log.info("%s is reached on the rung %r (%s)", node, rung, why or "it was the quickest")
            self._note_detour(node, rung)
        return link

    def _redial(self, node: str, role: str) -> Link:
        """A link with a node that was reached through a relay, on a better way."""
        race = Race(node, _UPGRADE_S, _close)
        race.start("meeting", lambda: self._meet(race, "", role, node, may_relay=False))
        return race.finish()

    def _meet(self, race: Race, url: str, role: str, node: str, *, may_relay: bool = True) -> None:
        """Ask the other side to meet us, and start every way that its answer opens."""
        rendezvous, relays = self._rendezvous, self.relays
        assert rendezvous is not None
        meeting = secrets.token_bytes(MEETING_BYTES)
        with contextlib.ExitStack() as undo:
            port = relays.punch_port(_OBSERVE_S)
            if port is not None:
                undo.callback(port.close)
            ours = relays.distances if may_relay else ()
            expected = self.callbacks.expect(meeting, node)
            undo.callback(expected.close)
            seen = "" if port is None else port.seen
            offer = MeetOffer(meeting, role, tuple(self._maker.addresses), seen, ours)
            answer = decode_said(rendezvous(node, encode_said(offer)), MeetAnswer)
            undo.pop_all()
        race.start(CALLBACK, lambda: expected.wait(min(race.left_s(), _CALLBACK_S)), otherwise=expected.close)
        for other in answer.direct:
            if other != url:
                race.start(DIRECT, partial(self._maker.dial_direct, other, role, node))
        punches = port is not None and bool(answer.seen)
        if port is not None and punches:
            race.start(
                PUNCHED, lambda: self._punch(port, race, answer.seen, role, node), otherwise=port.close
            )
        elif port is not None:
            port.close()
        names = relays.in_common(ours, answer.relays)
        for index, name in enumerate(names):
            waits = punches and self._detour(node) != RELAYED
            wait_s = (_RELAY_AFTER_S if waits else 0.0) + index * _NEXT_RELAY_S
            race.start(RELAYED, partial(self._relay, race, name, meeting, role, node), after_s=wait_s)

    def _punch(self, port: PunchPort, race: Race, target: str, role: str, node: str) -> Link:
        with port:
            deadline = time.monotonic() + race.left_s()
            sock = port.connect(target, deadline, lambda: not race.is_over)
        return self._maker.open_over(sock, PUNCHED, role, node)

    def _relay(self, race: Race, name: str, meeting: bytes, role: str, node: str) -> Link:
        sock = self.relays.meet(name, meeting, node, race.left_s())
        return self.upgrades.dialled(self._maker.open_over(sock, RELAYED, role, node), role, meeting)

    # The other side

    def answer(self, caller: str, content: bytes) -> bytes:
        """A node wants a link with us: begin with our part of every way, and say what it needs for its own."""
        offer = decode_said(content, MeetOffer)
        if not self.upgrades.is_expected(offer.role, caller):
            self._maker.check_role(offer.role)
        if not self._meetings.acquire(blocking=False):
            raise LinkError(f"{_MOST_MEETINGS} nodes are met already", hint="try again in a moment")
        try:
            port = self.relays.punch_port(_OBSERVE_S) if offer.seen else None
        except BaseException:
            self._meetings.release()
            raise
        answer = MeetAnswer(
            tuple(self._maker.addresses), "" if port is None else port.seen, self.relays.distances
        )
        in_background(f"meet {caller}", lambda: self._come(caller, offer, answer, port))
        return encode_said(answer)

    def _come(self, caller: str, offer: MeetOffer, answer: MeetAnswer, port: PunchPort | None) -> None:
        deadline = time.monotonic() + _MEET_S
        role = self.callbacks.role(offer.meeting)
        ways: list[Callable[[], None]] = [
            partial(self._maker.serve_callback, url, role, offer.role, caller) for url in offer.direct
        ]
        if port is not None:
            ways.append(partial(self._answer_punch, port, offer.seen, deadline, caller))
        ways += [
            partial(self._answer_relay, name, offer.meeting, deadline, caller)
            for name in self.relays.in_common(offer.relays, answer.relays)
        ]
        threads = [threading.Thread(target=_tried, args=(way, caller), daemon=True) for way in ways]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._meetings.release()

    def _answer_punch(self, port: PunchPort, target: str, deadline: float, caller: str) -> None:
        with port:
            sock = port.connect(target, deadline, listens=True)
        self._maker.answer_over(sock, PUNCHED, caller, b"")

    def _answer_relay(self, name: str, meeting: bytes, deadline: float, caller: str) -> None:
        sock = self.relays.meet(name, meeting, caller, deadline - time.monotonic())
        self._maker.answer_over(sock, RELAYED, caller, meeting)

    def _detour(self, node: str) -> str:
        """The rung on which a node was reached lately; "" where that was its address, or long ago."""
        with self._lock:
            at_s, rung = self._detours.get(node, (0.0, ""))
        return rung if rung and time.monotonic() - at_s < _REMEMBER_S else ""

    def _note_detour(self, node: str, rung: str) -> None:
        with self._lock:
            self._detours[node] = (time.monotonic(), rung)
            self._detours.move_to_end(node)
            while len(self._detours) > _MOST_REMEMBERED:
                self._detours.popitem(last=False)


def _close(link: Link) -> None:
    link.close()


def _tried(way: Callable[[], None], caller: str) -> None:
    try:
        way()
    except (ShardComputeError, OSError, ValueError) as error:
        log.debug("a way to %s failed: %s", caller, error)
