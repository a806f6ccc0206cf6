"""Where nodes report to the coordinator: control links, who comes, who goes, and who is thrown out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

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
    ShardFailed,
    decode_event,
)
from shardcompute.control.node_transitions import next_incarnation
from shardcompute.control.state import COORDINATOR
from shardcompute.core.errors import LinkError, UsageError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.node.coordinator.driver_ports import RemoteDrivers
from shardcompute.node.coordinator.executor import ActionExecutor, CoordinatorPort
from shardcompute.node.coordinator.liveness import LivenessProbe
from shardcompute.node.coordinator.node_registry import ConnectedNode, NodeRegistry
from shardcompute.node.coordinator.validation import validate_join, validate_report, validate_role
from shardcompute.node.rpc.commands import Peer, Probe
from shardcompute.security.certificates import read_peer
from shardcompute.wire import Link, LinkPump, Message, Refused
from shardcompute.wire.control import CommandReply, Heartbeat, NodeEvent, Register, Registered

log = logging.getLogger(__name__)
_EXPEL_TIMEOUT_S = 5.0
_GOODBYE_S = 0.1


class ControlServer:
    """`serve` and `expel` may be called from any thread; all that follows happens in the coordinator's."""

    def __init__(
        self,
        truth: CoordinatorPort,
        origin: Peer,
        members: NodeRegistry,
        drivers: RemoteDrivers,
        deeds: ActionExecutor,
        doors: LivenessProbe,
        revocations: Callable[[], bytes],
    ) -> None:
        self._truth = truth
        self._origin = origin
        self._members = members
        self._drivers = drivers
        self._deeds = deeds
        self._doors = doors
        self._revocations = revocations
        self._limited_log = RateLimitedLog(log)

    def serve(self, link: Link) -> None:
        """Serve one node's control link until it ends."""
        ended = threading.Event()
        reasons: list[LinkError] = []

        def end(error: LinkError) -> None:
            reasons.append(error)
            ended.set()

        pump = LinkPump(link, lambda m, _: self._take(link.peer, pump, m), end)
        pump.start()
        ended.wait()
        pump.close()
        self._limited_log.info(link.peer, "the control link of %s ended: %s", link.peer, reasons[0].message)
        self._truth.later(lambda: self._link_ended(link.peer, pump))

    def _take(self, node: str, pump: LinkPump, message: Message) -> None:
        if isinstance(message, Register):
            self._take_registration(node, pump, decode_event(message.event))
        elif isinstance(message, Heartbeat):
            if needs_rejoin(self._truth.state, node, message.incarnation):
                # It was given up in the meantime: let it register again with what it holds.
                pump.link.close()
                return
            self._truth.later(
                lambda: self._truth.apply(NodeSeen(node, message.incarnation, self._truth.now_s()))
            )
        elif isinstance(message, NodeEvent):
            self._take_event(node, pump, decode_event(message.event))
        elif isinstance(message, CommandReply):
            self._members.answered(pump, message)

    def _take_registration(self, node: str, pump: LinkPump, event: Event) -> None:
        reason: str | None = "a node may only register itself"
        if isinstance(event, NodeJoined) and event.node == node:
            reason = validate_join(event) or validate_role(event.role, read_peer(pump.link.certificate).roles)
            if reason is None:
                self._truth.later(lambda: self._register(event, pump))
                return
        self._limited_log.warning(node, "%s was not registered: %s", node, reason)
        pump.offer(Refused(f"This node is not registered: {reason}"), timeout_s=1.0)

    def _take_event(self, node: str, pump: LinkPump, event: Event) -> None:
        try:
            heard = validate_report(event, node, self._origin.node, self._truth.state.nodes)
        except UsageError as error:
            self._limited_log.warning(
                node, "a %s of %s is ignored: %s", type(event).__name__, node, error.message
            )
            return
        if isinstance(heard, LinkBroken | ShardFailed):
            self._truth.later(
                lambda: self._truth.apply(msgspec.structs.replace(heard, now_s=self._truth.now_s()))
            )
        elif isinstance(heard, NodeDrained | NodeLeft):
            self._truth.later(lambda: self._take_leave(heard, pump))
        else:
            self._truth.post(heard)

    def _register(self, event: NodeJoined, pump: LinkPump) -> None:
        if self._drivers.is_taken(event.node, event.session_namespace):
            self._members.offer(
                pump, Refused("Another driver numbers its sessions in the same way; start again")
            )
            return
        incarnation = next_incarnation(self._truth.state, event.node)
        self._members.enter(ConnectedNode(event.node, incarnation, pump))
        self._truth.apply(msgspec.structs.replace(event, incarnation=incarnation, now_s=self._truth.now_s()))
        interval = self._truth.state.health.heartbeat_interval_s
        self._members.offer(pump, Registered(incarnation, interval, self._revocations()))
        others = [
            Peer(n.id, n.address)
            for n in self._truth.state.nodes.values()
            if n.is_live and n.id != event.node
        ]
        self.probe(event.node, self._origin, *others)
        self._doors.find(event.node, event.address)
        if event.role == "driver":
            self._drivers.introduce(event.node)
            self._deeds.report_again()
        for chain in {shard.chain for shard in event.shards}:
            self._deeds.dismiss(self._truth.state.nodes[event.node], chain)

    def probe(self, node: str, *peers: Peer) -> None:
        self._members.command(node, Probe(list(peers)), lambda _: None)

    def expel(self, node: str) -> None:
        """A node was revoked: tell it, forget it, and give the others the news. Returns once they were sent."""
        done = threading.Event()
        self._truth.later(lambda: self._expel(node))
        self._truth.later(done.set)
        done.wait(_EXPEL_TIMEOUT_S)

    def _expel(self, node: str) -> None:
        member = self._members.leave(node)
        if member is not None:
            self._members.offer(member.pump, Refused("This node has been removed from the cluster"))
            member.pump.close(drain_s=_GOODBYE_S)
        known = self._truth.state.nodes.get(node)
        if known is not None:
            self._truth.apply(NodeLeft(node, known.incarnation))
        interval = self._truth.state.health.heartbeat_interval_s
        for each in self._members.all():
            self._members.offer(each.pump, Registered(each.incarnation, interval, self._revocations()))

    def _link_ended(self, node: str, pump: LinkPump) -> None:
        member = self._members.leave(node, pump)
        if member is None or self._truth.has_stood_down:
            return
        self._truth.apply(LinkBroken(COORDINATOR, node, self._truth.now_s()))
        known = self._truth.state.nodes.get(node)
        if known is not None and known.is_live:
            self._doors.knock(node, known.address, lambda: self._truth.later(lambda: self._bury(member)))

    def _bury(self, member: ConnectedNode) -> None:
        if not self._truth.has_stood_down:
            reason = "its process has ended"
            self._truth.apply(NodeLost(member.node, member.incarnation, reason, self._truth.now_s()))

    def _take_leave(self, event: NodeDrained | NodeLeft, pump: LinkPump) -> None:
        """A node wants to go, or goes. It knows by the end of its link that this was heard, and does not wait for
        others to take over where none will."""
        if not self._truth.has_stood_down:
            self._truth.apply(event)
        if self._truth.has_stood_down or isinstance(event, NodeLeft):
            self._members.leave(event.node, pump)
            pump.link.close()
