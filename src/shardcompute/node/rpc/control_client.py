"""A node's link to its coordinator: registered, heard from, told what to do, and dialled again when it breaks."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from shardcompute.control.events import Event, NodeDrained, NodeJoined, NodeLeft, encode_event
from shardcompute.core.errors import AuthError, LinkError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.core.sockets.hosts import with_host
from shardcompute.node.reach.race import Race
from shardcompute.node.reach.reach import HEAD_START_S
from shardcompute.node.rpc.commands import Leave, MeetNode, NodeCommand, decode_command
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.node.rpc.ledger_follower import LedgerFollower
from shardcompute.node.rpc.renewal import CertificateRenewal
from shardcompute.node.rpc.whereabouts import Whereabouts
from shardcompute.relay.client import RelayPass
from shardcompute.security.names import Role
from shardcompute.security.revocations import Revocations
from shardcompute.wire import Link, LinkPump, Message, Refused
from shardcompute.wire.control import (
    CertificateIssued,
    Command,
    CommandReply,
    DraftHeadReport,
    Heartbeat,
    HeartbeatHeard,
    LedgerShown,
    MeetPeer,
    NodeEvent,
    PeerAnswered,
    QuotaGranted,
    Register,
    Registered,
    RelayAccess,
    StepOverdue,
    UsageTaken,
)

log = logging.getLogger(__name__)
_REGISTER_TIMEOUT_S = 10.0
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0)
_GOODBYE_S = 1.0
_MEET_TIMEOUT_S = 4.0
_SILENCE_S = 2.5
"""So long a coordinator among several may say nothing. Each answers heartbeats while it leads."""
_DIAL_S = 1.5
"""For the answer of one of several, so that the others are tried soon."""
_SEEK_EVERY = 4
"""Attempts between two searches for a coordinator that has gone elsewhere."""
_MOST_URLS = 8
FindAgain = Callable[[], Sequence[str]]


class HeartbeatFacts(NamedTuple):
    """What a node says of itself with every heartbeat, see `Heartbeat`."""

    resident_bytes: int = 0
    kv_used_bytes: int = 0
    draft_heads: tuple[DraftHeadReport, ...] = ()
    busy_watts: float = 0.0
    idle_watts: float = 0.0
    seeded_bytes: int = 0


class ControlClient:
    """Keeps the link. `describe` says what the node is and holds; `carry_out` does what it is told, except to leave,
    in a thread per command; `on_registered` hears the incarnation and the revocations, and may tell what was not
    heard before; `heartbeat_facts` are told with every heartbeat; `on_accounts` hears what the coordinator's ledger
    answers. The node's certificate is renewed over the link.

    Where a cluster has several coordinators, the node follows the one that leads: it tries all that it knows in turn,
    learns of others from it (`on_urls`), and does not listen to one whose epoch is over."""

    def __init__(
        self,
        endpoint: Endpoint,
        urls: Sequence[str],
        describe: Callable[[], NodeJoined],
        carry_out: Callable[[NodeCommand], bytes],
        on_registered: Callable[[int, Revocations], None],
        heartbeat_facts: Callable[[], HeartbeatFacts] = HeartbeatFacts,
        on_accounts: Callable[[Message], None] = lambda message: None,
        on_urls: Callable[[list[str]], None] = lambda urls: None,
        *,
        whereabouts: Whereabouts | None = None,
        find_again: FindAgain = lambda: (),
    ) -> None:
        """`find_again` says where else the coordinator may be, when it is at none of its addresses for a while."""
        self._whereabouts = whereabouts or Whereabouts(endpoint, follows=False)
        self._find_again = find_again
        self._found: list[str] = []
        """Addresses that nobody has told us of, and that were not tried yet."""
        self._endpoint = endpoint
        self._renewal = CertificateRenewal(endpoint)
        self._ledger = LedgerFollower(lambda: endpoint.credentials, lambda: heartbeat_facts().seeded_bytes)
        self._urls = list(urls)
        self._url = self._urls[0]
        """The one that was tried last."""
        self._describe = describe
        self._carry_out = carry_out
        self._on_registered = on_registered
        self._heartbeat_facts = heartbeat_facts
        self._on_accounts = on_accounts
        self._on_urls = on_urls
        self._leader_epoch = 0
        self._heard_s = 0.0
        self._pump: LinkPump | None = None
        self._registered = threading.Event()
        self._lost = threading.Event()
        self._answered = threading.Event()
        """Set once the coordinator has registered this node, or the link has ended before that."""
        self._closing = threading.Event()
        self._is_leaving = False
        self._has_no_more = threading.Event()
        self.left = threading.Event()
        """Set once the coordinator has told this node to leave."""
        self._incarnation = 0
        self._heartbeat_s = 0.5
        self._refusal = ""
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[PeerAnswered]] = {}
        self._coordinator_host = ""
        if endpoint.reach is not None:
            endpoint.reach.meet_through(self._meet)
        self._thread = threading.Thread(target=self._keep, name="control", daemon=True)

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @property
    def is_registered(self) -> bool:
        """Whether the coordinator hears this node."""
        return self._registered.is_set()

    @property
    def refusal(self) -> str:
        """Why the coordinator will not have this node any more; "" while it will."""
        return self._refusal

    def start(self) -> None:
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Report what happened; dropped while the coordinator is away (registration tells it again)."""
        self._send(NodeEvent(encode_event(event)), type(event).__name__)

    def report(self, overdue: StepOverdue) -> None:
        """Have a step looked for; dropped while the coordinator is away, as it is reported again."""
        self._send(overdue, "a step that is overdue")

    def send_accounts(self, message: Message) -> bool:
        """Tell the coordinator's ledger something; whether it went out."""
        return self._send(message, "what API keys used")

    def _send(self, message: Message, what: str) -> bool:
        pump = self._pump
        if pump is not None and self._registered.is_set():
            try:
                pump.offer(message, timeout_s=5.0)
                return True
            except LinkError as error:
                log.info("the coordinator did not hear of %s: %s", what, error.message)
        return False

    def _meet(self, node: str, offer: bytes) -> bytes:
        """Have the coordinator carry an offer to a node; what that answers. Raises LinkError."""
        pump, number = self._pump, next(self._numbers)
        if pump is None or not self._registered.is_set():
            raise LinkError("the coordinator, which would bring the two together, is away")
        answers = self._answers[number] = queue.SimpleQueue()
        try:
            pump.offer(MeetPeer(number, node, offer), timeout_s=1.0)
            answered = answers.get(timeout=_MEET_TIMEOUT_S)
        except queue.Empty:
            raise LinkError(f"{node} did not answer in time ({_MEET_TIMEOUT_S:g} s)") from None
        finally:
            del self._answers[number]
        if answered.error:
            raise LinkError(f"{node} cannot be met: {answered.error}")
        return answered.answer

    def _learn_relays(self, message: RelayAccess) -> None:
        """A coordinator that listens everywhere names no host for its relay: the one that we dialled is it."""
        host = self._coordinator_host
        relays = [[with_host(url, host) for url in doors] for doors in message.relays]
        if self._endpoint.reach is not None:
            identity = self._endpoint.credentials.identity
            self._endpoint.reach.learn(RelayPass(identity, message.ticket), relays)

    def leave(self, node: str, patience_s: float = 0.0) -> None:
        """Leave in order: ask to be relieved of all work and go on with it until that is so, for `patience_s` at most;
        then say goodbye and wait a moment for that to be heard. The coordinator is not dialled again."""
        self._is_leaving = True
        if not self._registered.is_set():
            return
        if patience_s > 0:
            self.tell(NodeDrained(node))
            self._has_no_more.wait(patience_s)
        self.tell(NodeLeft(node, self._incarnation))
        self._lost.wait(_GOODBYE_S)

    def close(self) -> None:
        self._closing.set()
        self._lost.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _keep(self) -> None:
        attempt = place = 0
        while not (self._closing.is_set() or self._is_leaving):
            try:
                link, place = self._dial_any(place)
                self._coordinator_host = urlsplit(self._url).hostname or ""
                self._serve(link)
                # What there is may have been told anew.
                attempt = 0
                place = self._urls.index(self._url) if self._url in self._urls else 0
            except AuthError as error:
                self._refusal = error.message
                return
            except LinkError as error:
                if self._refusal:
                    return
                if attempt == 0:
                    log.warning("the coordinator cannot be reached: %s; trying again", error.message)
                attempt, place = attempt + 1, place + 1
                self._look_elsewhere(attempt)
            # Among several one may lead already: all of them are tried, often.
            longest = len(_BACKOFF_S) - 1 if len(self._urls) == 1 else 1
            self._closing.wait(_BACKOFF_S[min(attempt, longest)])

    def _dial_any(self, place: int) -> tuple[Link, int]:
        """A link with a coordinator, from this place of the list on, and the place at which it answered. Those that
        follow are dialled a moment later, side by side: an address may lead nowhere and say nothing."""
        urls = list(self._urls)
        order = [(place + number) % len(urls) for number in range(len(urls))]
        self._url = urls[order[0]]
        self._whereabouts.settle(self._url)
        if len(urls) == 1:
            return self._endpoint.dial(self._url, "control", needs=Role.COORDINATOR), 0
        race = Race("the coordinator", _DIAL_S + len(urls) * HEAD_START_S, lambda link: link.close())
        answered: list[tuple[Link, int]] = []

        def dial(at: int) -> Link:
            link = self._endpoint.dial(urls[at], "control", needs=Role.COORDINATOR, timeout_s=_DIAL_S)
            answered.append((link, at))
            return link

        for number, at in enumerate(order):
            race.start(urls[at], partial(dial, at), after_s=number * HEAD_START_S)
        link = race.finish()
        won = next(at for each, at in answered if each is link)
        if urls[won] != self._url and self._whereabouts.settle(urls[won]):
            link.close()
            link = dial(won)
        self._url = urls[won]
        return link, won

    def _look_elsewhere(self, attempt: int) -> None:
        """Ask now and then where the coordinator may be. Only its certificate proves that it is there."""
        if attempt % _SEEK_EVERY != 0 or self._closing.is_set():
            return
        try:
            found = self._find_again()
        except ShardComputeError as error:
            log.info("the coordinator was not found elsewhere: %s", error.message)
            return
        new = [url for url in found if url not in self._urls]
        if new:
            log.info("the coordinator may be at %s", ", ".join(new))
            # Those that it had first: it may come back there.
            self._found = new
            self._urls = [*self._urls[:_MOST_URLS], *new][: 2 * _MOST_URLS]

    def _arrive(self, link: Link) -> None:
        """The coordinator is at this address, and knows where we are."""
        self._endpoint.reached(link.peer, self._url)
        self._endpoint.arrived()
        if self._url in self._found:
            self._found = []
            self._on_urls(list(self._urls))

    def _serve(self, link: Link) -> None:
        for each in (self._lost, self._registered, self._answered):
            each.clear()
        pump = LinkPump(link, self._take, self._link_ended)
        pump.start()
        self._pump = pump
        try:
            pump.offer(Register(encode_event(self._describe())), timeout_s=_REGISTER_TIMEOUT_S)
            self._answered.wait(_REGISTER_TIMEOUT_S)
            if not self._registered.is_set():
                raise LinkError(self._refusal or "the coordinator did not register this node in time")
            self._arrive(link)
            while not self._closing.is_set() and not self._lost.wait(self._heartbeat_s):
                if self._leader_epoch and time.monotonic() - self._heard_s > _SILENCE_S:
                    raise LinkError("the coordinator has fallen silent")
                if reason := self._whereabouts.look(self._url):
                    log.info("%s: the coordinator is dialled anew", reason)
                    return
                beat = Heartbeat(self._incarnation, *self._heartbeat_facts())
                pump.offer(beat, timeout_s=self._heartbeat_s)
                if (request := self._renewal.next_request()) is not None:
                    pump.offer(request, timeout_s=_REGISTER_TIMEOUT_S)
                if (look := self._ledger.next_look(link.peer)) is not None:
                    pump.offer(look, timeout_s=_REGISTER_TIMEOUT_S)
        finally:
            self._pump = None
            self._registered.clear()
            pump.close()
        if self._refusal:
            raise AuthError(self._refusal)

    def _link_ended(self, error: LinkError) -> None:
        self._lost.set()
        self._answered.set()
        if self._is_leaving:
            self._has_no_more.set()

    def _take(self, message: Message, body: memoryview) -> None:
        if isinstance(message, Registered):
            if message.leader_epoch < self._leader_epoch:
                log.warning("a coordinator whose epoch is over answered: looking for the one that leads")
                self._lost.set()
                self._answered.set()
                return
            self._leader_epoch = message.leader_epoch
            self._learn_urls(message.control_urls)
            self._incarnation, self._heard_s = message.incarnation, time.monotonic()
            self._heartbeat_s = message.heartbeat_interval_s
            revocations = (
                Revocations.from_bytes(message.revocations) if message.revocations else Revocations()
            )
            self._ledger.begin(has_ledger=message.has_ledger)
            self._registered.set()
            self._answered.set()
            self._on_registered(message.incarnation, revocations)
        elif isinstance(message, HeartbeatHeard):
            self._heard_s = time.monotonic()
        elif isinstance(message, Refused):
            self._refusal = message.reason
            self._answered.set()
        elif isinstance(message, CertificateIssued):
            if self._renewal.take(message):
                self._lost.set()  # the link is dialled again, with what was issued
        elif isinstance(message, RelayAccess):
            self._learn_relays(message)
        elif isinstance(message, PeerAnswered):
            waiting = self._answers.get(message.number)
            if waiting is not None:
                waiting.put(message)
        elif isinstance(message, QuotaGranted | UsageTaken):
            self._on_accounts(message)
        elif isinstance(message, LedgerShown):
            pump = self._pump
            if pump is not None and (said := self._ledger.take(message, pump.link.peer)) is not None:
                self._send(said, "what is wrong with its ledger")
        elif isinstance(message, Command):
            threading.Thread(target=self._obey, args=(message,), name="command", daemon=True).start()

    def _answer_meeting(self, command: MeetNode) -> bytes:
        if self._endpoint.reach is None:
            raise LinkError("this node cannot be met: it has no links of its own to the network")
        return self._endpoint.reach.answer(command.caller, command.offer)

    def _learn_urls(self, urls: Sequence[str]) -> None:
        """All coordinators that there are. The one that answered stays the first to be tried."""
        current = self._url
        known = list(dict.fromkeys([current, *urls]))
        if urls and set(known) != set(self._urls):
            self._urls = known
            self._on_urls(known)

    def _obey(self, message: Command) -> None:
        started = time.monotonic()
        error, result = "", b""
        try:
            command = decode_command(message.action)
            if isinstance(command, Leave):
                self.left.set()
                self._has_no_more.set()
            elif isinstance(command, MeetNode):
                result = self._answer_meeting(command)
            else:
                result = self._carry_out(command)
        except ShardComputeError as failure:
            error = str(failure)
        except Exception as failure:
            log.exception("a command failed")
            error = repr(failure)
        log.debug("command %d took %.3f s", message.number, time.monotonic() - started)
        pump = self._pump
        if pump is not None:
            try:
                pump.offer(CommandReply(message.number, shorten(error), result), timeout_s=5.0)
            except LinkError:
                log.info("the coordinator went away before command %d was answered", message.number)
