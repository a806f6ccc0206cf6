"""Server of the nodes' control links: registration, heartbeats, what they report, and how they go."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shardcompute.control import needs_rejoin
from shardcompute.control.events import (
    Event,
    LinkBroken,
    NodeDrained,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeSeen,
    NodesSeen,
    RingTimed,
    ShardFailed,
    StageTimed,
    decode_event,
)
from shardcompute.control.state import COORDINATOR, ClusterState, HeldDraftHead
from shardcompute.control.transitions.node_transitions import next_incarnation
from shardcompute.core.errors import AuthError, LinkError, ShardComputeError, UsageError
from shardcompute.core.fields import shorten
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.node.coordinator.coordinator_port import CoordinatorPort
from shardcompute.node.coordinator.driver_attachments import DriverAttachments
from shardcompute.node.coordinator.driver_port import DriverPorts
from shardcompute.node.coordinator.executor import ActionExecutor
from shardcompute.node.coordinator.liveness import LivenessProbe
from shardcompute.node.coordinator.node_registry import ConnectedNode, NodeRegistry
from shardcompute.node.coordinator.stalled_steps import StalledSteps
from shardcompute.node.coordinator.validation import (
    sane_watts,
    validate_count,
    validate_join,
    validate_report,
    validate_role,
)
from shardcompute.node.rpc.commands import MeetNode, Peer, Probe
from shardcompute.node.rpc.member_budget import (
    MESSAGE_BYTES,
    REGISTRATION_BYTES,
    SIGNATURE_BYTES,
    MemberBudget,
)
from shardcompute.security.certificates import PeerIdentity, read_peer
from shardcompute.security.names import Role
from shardcompute.wire import Link, LinkPump, Message, Refused
from shardcompute.wire.control import (
    MOST_OFFER_BYTES,
    CertificateIssued,
    CommandReply,
    DrawQuota,
    Heartbeat,
    HeartbeatHeard,
    LedgerDoubted,
    LedgerShown,
    LookAtLedger,
    MeetPeer,
    NodeEvent,
    PeerAnswered,
    QuotaGranted,
    Register,
    Registered,
    RelayAccess,
    RenewCertificate,
    ReportUsage,
    StepOverdue,
    UsageTaken,
)

log = logging.getLogger(__name__)
_REVOKE_TIMEOUT_S = 5.0
_GOODBYE_S = 0.1
SignRequest = Callable[[PeerIdentity, str], str]
"""The next certificate (PEM) of a node that has shown its present one, for what it asks. Raises where it gets none."""


class MemberAccounts(Protocol):
    """What drivers in processes of their own use on behalf of clients. Called from their links' threads."""

    def draw(self, node: str, message: DrawQuota) -> QuotaGranted: ...

    def count(self, node: str, message: ReportUsage) -> bool:
        """Whether the report counts, now or since before; otherwise it is told again."""
        ...


class MemberLedger(Protocol):
    """The cluster's ledger, as members look at it. Called from their links' threads."""

    def show(self, node: str, message: LookAtLedger) -> LedgerShown | None:
        """Its head, for a member that has seen an earlier one; None: there is none."""
        ...

    def doubted(self, node: str, message: LedgerDoubted) -> None: ...


class NoAccounts:
    """`MemberAccounts` of a coordinator without keys."""

    def draw(self, node: str, message: DrawQuota) -> QuotaGranted:
        return QuotaGranted(message.number, error="This coordinator keeps no accounts")

    def count(self, node: str, message: ReportUsage) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Lead:
    """Which coordinator nodes are to follow: its epoch among several (0: there is one), and where all of them are."""

    epoch: int = 0
    control_urls: tuple[str, ...] = ()


def refuse_to_sign(peer: PeerIdentity, request_pem: str) -> str:
    """A `SignRequest` of a coordinator without an authority."""
    raise AuthError("This coordinator signs no certificates", hint="join again with a token")


GrantRelays = Callable[[PeerIdentity], RelayAccess | None]
"""Which relays a member may use, and its ticket for them; None where there are none."""
FindStanding = Callable[[str], str | None]
"""What was verified of a node's hardware, "" where nothing has to be; None: it may not work here."""
AnswerMeeting = Callable[[str, bytes], bytes]
"""The coordinator's own answer to a node that wants a link with it. Raises LinkError."""
_GRANT_EVERY_S = 1800.0


def refuse_to_meet(caller: str, offer: bytes) -> bytes:
    """An `AnswerMeeting` of a coordinator that is reached by its address alone."""
    raise LinkError("the coordinator is reached by its address alone")


class ControlServer:
    """`serve`, `receive` and `revoke` may be called from any thread; all that follows happens in the coordinator's."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        origin: Peer,
        registry: NodeRegistry,
        ports: DriverPorts,
        attachments: DriverAttachments,
        executor: ActionExecutor,
        stalled: StalledSteps,
        liveness: LivenessProbe,
        revocations: Callable[[], bytes],
        sign: SignRequest,
        grant: GrantRelays = lambda peer: None,
        answer: AnswerMeeting = refuse_to_meet,
        accounts: MemberAccounts | None = None,
        lead: Callable[[], Lead] = Lead,
        ledger: MemberLedger | None = None,
        standing: FindStanding = lambda node: "",
    ) -> None:
        self._ledger = ledger
        self._grant = grant
        self._answer = answer
        self._coordinator = coordinator
        self._origin = origin
        self._registry = registry
        self._ports = ports
        self._attachments = attachments
        self._executor = executor
        self._stalled = stalled
        self._liveness = liveness
        self._revocations = revocations
        self._sign = sign
        self._accounts = accounts or NoAccounts()
        self._lead = lead
        self._standing = standing
        self._limited_log = RateLimitedLog(log)
        self._budget = MemberBudget(coordinator.now_s)
        self._heartbeats: queue.SimpleQueue[NodeSeen] = queue.SimpleQueue()

    def serve(self, link: Link) -> None:
        """Serve one node's control link until it ends."""
        ended = threading.Event()
        reasons: list[LinkError] = []

        def end(error: LinkError) -> None:
            reasons.append(error)
            ended.set()

        pump = LinkPump(link, lambda m, _: self.receive(pump, m), end)
        pump.start()
        ended.wait()
        pump.close()
        self._limited_log.info(link.peer, "the control link of %s ended: %s", link.peer, reasons[0].message)
        self._coordinator.later(lambda: self.link_ended(pump))

    def receive(self, pump: LinkPump, message: Message) -> None:
        """A message came over a node's link."""
        node = pump.link.peer
        if not self._budget.spend(node, _cost(message)):
            # It describes itself anew when it dials again, so nothing true is lost.
            self._limited_log.warning(node, "%s says too much: its link is ended", node)
            pump.link.close()
            return
        if isinstance(message, Register):
            self._receive_registration(node, pump, decode_event(message.event))
        elif isinstance(message, Heartbeat):
            if needs_rejoin(self._coordinator.state, node, message.incarnation):
                # It was given up in the meantime: let it register again with what it holds.
                pump.link.close()
                return
            if self._lead().epoch and self._coordinator.may_act:
                self._registry.offer(pump, HeartbeatHeard())
            beat = (message.incarnation, 0.0, message.resident_bytes, message.kv_used_bytes)
            heads = tuple(
                HeldDraftHead(each.chain, each.size_bytes, shorten(each.problem))
                for each in message.draft_heads
            )
            watts = (sane_watts(message.busy_watts), sane_watts(message.idle_watts))
            self._heartbeats.put(NodeSeen(node, *beat, heads, *watts, message.seeded_bytes))
            self._coordinator.later(self._hear_heartbeats)
        elif isinstance(message, NodeEvent):
            self._receive_event(node, pump, decode_event(message.event))
        elif isinstance(message, CommandReply):
            heard = CommandReply(message.number, shorten(message.error), message.result)
            self._registry.answered(pump, heard)
        elif isinstance(message, StepOverdue):
            self._coordinator.later(lambda: self._stalled.look_for(message, node))
        elif isinstance(message, RenewCertificate):
            self._renew(pump, message)
        elif isinstance(message, MeetPeer):
            self._introduce(node, pump, message)
        elif isinstance(message, DrawQuota | ReportUsage):
            self._account(pump, message)
        elif isinstance(message, LookAtLedger | LedgerDoubted):
            self._look_at_ledger(pump, message)

    def _look_at_ledger(self, pump: LinkPump, message: LookAtLedger | LedgerDoubted) -> None:
        if self._ledger is None:
            return
        if isinstance(message, LedgerDoubted):
            self._ledger.doubted(pump.link.peer, message)
        elif (shown := self._ledger.show(pump.link.peer, message)) is not None:
            self._registry.offer(pump, shown)

    def _introduce(self, caller: str, pump: LinkPump, message: MeetPeer) -> None:
        """Carry a node's offer to the one that it wants to meet, and the answer back."""
        number = message.number

        def reply(error: str, answer: bytes = b"") -> None:
            said = PeerAnswered(number, shorten(error), b"" if len(answer) > MOST_OFFER_BYTES else answer)
            self._registry.offer(pump, said)

        def answer_here() -> None:
            try:
                reply("", self._answer(caller, message.offer))
            except LinkError as error:
                reply(error.message)

        if message.peer == self._origin.node:
            self._coordinator.background(answer_here)
        else:
            command = MeetNode(caller, message.offer)
            self._registry.command(message.peer, command, lambda heard: reply(heard.error, heard.result))

    def grant_relays(self) -> None:
        """Give every node that is here its next ticket, from time to time."""
        for each in self._registry.all():
            self._grant_to(each.pump)
        self._coordinator.after(_GRANT_EVERY_S, self.grant_relays)

    def _grant_to(self, pump: LinkPump) -> None:
        certificate = pump.link.certificate
        access = None if certificate is None else self._grant(read_peer(certificate))
        if access is not None:
            self._registry.offer(pump, access)

    def _account(self, pump: LinkPump, message: DrawQuota | ReportUsage) -> None:
        """Drivers alone speak for clients."""
        node = pump.link.peer
        if Role.DRIVER not in read_peer(pump.link.certificate).roles:
            self._limited_log.warning(node, "%s is no driver, and its accounts are ignored", node)
        elif isinstance(message, DrawQuota):
            granted = self._accounts.draw(node, message)
            if message.number:
                self._registry.offer(pump, granted)
        elif self._accounts.count(node, message):
            self._registry.offer(pump, UsageTaken(message.sequence))

    def _renew(self, pump: LinkPump, message: RenewCertificate) -> None:
        """Sign a node's next certificate, where its present one entitles it to that."""
        try:
            issued = CertificateIssued(self._sign(read_peer(pump.link.certificate), message.request_pem))
        except ShardComputeError as error:
            self._limited_log.warning(pump.link.peer, "%s gets no certificate: %s", pump.link.peer, error)
            issued = CertificateIssued(error=shorten(str(error)))
        self._registry.offer(pump, issued)

    def _apply_later(self, node: str, event: LinkBroken | RingTimed | ShardFailed | StageTimed) -> None:
        """In its turn, at the time of the coordinator's clock: those of nodes mean nothing here."""
        now_s = self._coordinator.now_s
        self._coordinator.later(lambda: self._apply(node, msgspec.structs.replace(event, now_s=now_s())))

    def _receive_registration(self, node: str, pump: LinkPump, event: Event) -> None:
        reason: str | None = "a node may only register itself"
        if isinstance(event, NodeJoined) and event.node == node:
            reason = validate_join(event) or validate_role(event.role, read_peer(pump.link.certificate).roles)
            standing = self._standing(node) if event.role == "worker" else ""
            if reason is None and standing is None:
                reason = "this cluster takes only machines whose hardware is attested; join with --evidence"
            if reason is None:
                known = msgspec.structs.replace(event, attested=standing or "")
                self._coordinator.later(lambda: self._register(known, pump))
                return
        self._limited_log.warning(node, "%s was not registered: %s", node, reason)
        pump.offer(Refused(shorten(f"This node is not registered: {reason}")), timeout_s=1.0)

    def _receive_event(self, node: str, pump: LinkPump, event: Event) -> None:
        try:
            heard = validate_report(event, node, self._origin.node, self._coordinator.state.nodes)
        except UsageError as error:
            self._ignore(node, event, error.message)
            return
        if isinstance(heard, RingTimed):
            driver = _driver_of(self._coordinator.state, node, heard.chain)
            if driver is None:
                self._ignore(node, event, "it does not drive that chain")
            else:
                self._apply_later(node, msgspec.structs.replace(heard, driver=driver))
        elif isinstance(heard, LinkBroken | ShardFailed | StageTimed):
            self._apply_later(node, heard)
        elif isinstance(heard, NodeDrained | NodeLeft):
            self._coordinator.later(lambda: self._let_go(heard, pump))
        else:
            self._coordinator.later(lambda: self._apply(node, heard))

    # In the coordinator's thread

    def _hear_heartbeats(self) -> None:
        """All that have come so far, at once: the busier the coordinator, the more of them are one change."""
        now_s, seen = self._coordinator.now_s(), []
        with contextlib.suppress(queue.Empty):
            while True:
                seen.append(msgspec.structs.replace(self._heartbeats.get_nowait(), now_s=now_s))
        if seen:
            self._coordinator.apply(seen[0] if len(seen) == 1 else NodesSeen(tuple(seen)))

    def _apply(self, node: str, event: Event) -> None:
        """What a node reported, unless it has reported too many such things."""
        known = self._coordinator.state.nodes.get(node)
        reason = None if known is None else validate_count(event, known)
        if reason is None:
            self._coordinator.apply(event)
        else:
            self._ignore(node, event, reason)

    def _ignore(self, node: str, event: Event, reason: str) -> None:
        self._limited_log.warning(node, "a %s of %s is ignored: %s", type(event).__name__, node, reason)

    def _register(self, event: NodeJoined, pump: LinkPump) -> None:
        if not self._coordinator.may_act:
            # Another coordinator may lead: it goes on looking for that one.
            self._registry.remove(event.node, pump)
            pump.link.close()
            return
        if self._ports.is_taken(event.node, event.session_namespace):
            self._registry.offer(
                pump, Refused("Another driver numbers its sessions in the same way; start again")
            )
            return
        incarnation = next_incarnation(self._coordinator.state, event.node)
        self._registry.add(ConnectedNode(event.node, incarnation, pump))
        now_s = self._coordinator.now_s()
        self._coordinator.apply(msgspec.structs.replace(event, incarnation=incarnation, now_s=now_s))
        self._tell_registered(pump, incarnation)
        nodes = self._coordinator.state.nodes
        others = [Peer(n.id, n.address) for n in nodes.values() if n.is_live and n.id != event.node]
        self._registry.command(event.node, Probe([self._origin, *others]), lambda _: None)
        self._liveness.learn(event.node, event.address)
        if event.role == "driver":
            self._attachments.introduce(event.node)
        for chain in {shard.chain for shard in event.shards}:
            self._executor.forget_sessions(nodes[event.node], chain)

    def _tell_registered(self, pump: LinkPump, incarnation: int) -> None:
        interval_s, lead = self._coordinator.state.health.heartbeat_interval_s, self._lead()
        self._registry.offer(
            pump,
            Registered(
                incarnation,
                interval_s,
                self._revocations(),
                lead.epoch,
                lead.control_urls,
                self._ledger is not None,
            ),
        )
        self._grant_to(pump)

    def revoke(self, node: str) -> None:
        """A node was revoked: tell it, forget it, and give the others the news. Returns once they were sent."""
        done = threading.Event()
        self._coordinator.later(lambda: self._revoke(node))
        self._coordinator.later(done.set)
        done.wait(_REVOKE_TIMEOUT_S)

    def _revoke(self, node: str) -> None:
        revoked = self._registry.remove(node)
        if revoked is not None:
            self._registry.offer(revoked.pump, Refused("This node has been removed from the cluster"))
            revoked.pump.close(drain_s=_GOODBYE_S)
        known = self._coordinator.state.nodes.get(node)
        if known is not None:
            self._coordinator.apply(NodeLeft(node, known.incarnation))
        self.tell_all()

    def tell_all(self) -> None:
        """Give all nodes the news: who was revoked, and where coordinators are."""
        for each in self._registry.all():
            self._tell_registered(each.pump, each.incarnation)

    def link_ended(self, pump: LinkPump) -> None:
        """A node's control link is over; unless its process has ended, too, it dials again."""
        removed = self._registry.remove(pump.link.peer, pump)
        if removed is None or self._coordinator.has_stood_down:
            return
        node = removed.node
        self._coordinator.apply(LinkBroken(COORDINATOR, node, self._coordinator.now_s()))
        known = self._coordinator.state.nodes.get(node)
        if known is not None and known.is_live:

            def ended() -> None:
                self._coordinator.later(lambda: self._declare_lost(removed))

            self._liveness.check(node, known.address, ended)

    def _declare_lost(self, ended: ConnectedNode) -> None:
        if not self._coordinator.has_stood_down:
            now_s = self._coordinator.now_s()
            self._coordinator.apply(NodeLost(ended.node, ended.incarnation, "its process has ended", now_s))

    def _let_go(self, event: NodeDrained | NodeLeft, pump: LinkPump) -> None:
        """A node wants to go, or goes. It knows by the end of its link that this was heard, and does not wait for
        others to take over where none will."""
        if not self._coordinator.has_stood_down:
            self._coordinator.apply(event)
        if self._coordinator.has_stood_down or isinstance(event, NodeLeft):
            self._registry.remove(event.node, pump)
            pump.link.close()


def _driver_of(state: ClusterState, node: str, chain: str) -> str | None:
    """As which driver a node sees a chain's ring: "" as the worker that hosts the chain's own, else by its id where it
    uses the chain from elsewhere; None: it drives nothing of it."""
    known = state.chains.get(chain)
    if known is None:
        return None
    if known.driver_host == node:
        return ""
    return node if any(each.driver == node for each in known.drivers) else None


def _cost(message: Message) -> int:
    """What a message takes of its sender's budget. Answers were asked for."""
    if isinstance(message, Register):
        return REGISTRATION_BYTES + len(message.event)
    if isinstance(message, RenewCertificate):
        return SIGNATURE_BYTES
    if isinstance(message, MeetPeer):
        return MESSAGE_BYTES + len(message.offer)
    if isinstance(message, ReportUsage):
        return MESSAGE_BYTES * (1 + len(message.rows))
    return MESSAGE_BYTES + (len(message.event) if isinstance(message, NodeEvent) else 0)
