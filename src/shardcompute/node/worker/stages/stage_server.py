"""Stage server, a worker's data plane: what the coordinator asks of its stages, and what links bring them.

One thread computes for all shards (`step_loop`). Frames come in from whoever dialled us, go out over links that we
dial: to the next stage or, from the last one, straight to the driver. Frames of an old epoch are dropped. A step that
fails is reported to the driver, and the layers are given up where that was for want of memory; a link that fails is
reported to the coordinator, which changes the chain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from shardcompute.backends.executor import KvUsage
from shardcompute.core.errors import CollectiveError, DeviceMemoryError, LinkError
from shardcompute.core.process_memory import return_freed_memory
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.node.rpc.commands import (
    Admit,
    Connect,
    Connected,
    ExpectKv,
    OpenLinks,
    Peer,
    Redial,
    SendKv,
    ShownRows,
    ShowRows,
    StepTraced,
    TraceStep,
)
from shardcompute.node.rpc.session_ids import namespace_of
from shardcompute.node.rpc.step_times import STAGE_PATIENCE, Patience
from shardcompute.node.worker.migration.exchange import KvExchange
from shardcompute.node.worker.ranks.groups import RankGroups, RankMeeting
from shardcompute.node.worker.receipts.kept_rows import KeptRows
from shardcompute.node.worker.receipts.stage_receipts import StageReceipts
from shardcompute.node.worker.stages.peer_links import PeerLinks
from shardcompute.node.worker.stages.service_pace import ServicePace, ShardPace
from shardcompute.node.worker.stages.slot import StageSlot
from shardcompute.node.worker.stages.stage_output import StageOutput
from shardcompute.node.worker.stages.stage_slots import ShardKey, StageSlots
from shardcompute.node.worker.stages.step_loop import StepEvents, StepLoop
from shardcompute.runtime.head_drafter import HeadDrafter
from shardcompute.runtime.stage import StageRuntime
from shardcompute.security.credentials import Credentials
from shardcompute.security.receipts.records import StageClaim, id_of
from shardcompute.wire import Link, Message, SessionClose, SessionCommit, StepFrame

if TYPE_CHECKING:
    from shardcompute.collectives.fabric_group import FabricGroup
    from shardcompute.runtime.loaded_share import LateLeader, LoadedShare

_REST_S = 2.0
_MOST_PEERS = 8
MOST_LOG_BYTES = 256 << 20
"""What activation logs of all chains take together where memory is left for them."""


class StageServer:
    """Owns the shards of a worker and the links out of it. Methods may be called from any thread."""

    def __init__(
        self,
        node: str,
        dial: Callable[[Peer], Link],
        on_link_broken: Callable[[str], None],
        *,
        on_out_of_memory: Callable[[ShardKey, DeviceMemoryError], None] = lambda key, error: None,
        on_pace: Callable[[ShardKey, ShardPace], None] = lambda key, pace: None,
        ranks: RankGroups | None = None,
        credentials: Callable[[], Credentials] | None = None,
        dial_kv: Callable[[Peer], Link] | None = None,
        log_bytes: int = MOST_LOG_BYTES,
        patience: Patience = STAGE_PATIENCE,
        rest_s: float = _REST_S,
    ) -> None:
        """`ranks`: the groups of those who compute stages together; this server leads in some. `credentials`: with what
        it signs for answers that are to have a receipt. `dial_kv`: how sessions that move are sent to others, where not
        as frames are. Where nothing has come in for `rest_s`, memory is given back that only steps need."""
        self._ranks = ranks or RankGroups(dial, on_link_broken)
        self._links = PeerLinks(dial, on_link_broken)
        self._receipts = StageReceipts(credentials, self._links.send)
        self._kept_rows = KeptRows(log_bytes // 4)
        self._output = StageOutput(self._links, self._receipts)
        self._most_log_bytes = log_bytes
        self._log_bytes = log_bytes
        self._slots = StageSlots(node, patience)
        events = StepEvents(self._writes, self._sessions_ended, on_out_of_memory, on_pace)
        self._loop = StepLoop(node, self._slots, self._output, self._ranks, events, rest_s)
        self._kv = KvExchange(dial_kv or dial, self._loop.perform)
        self._ranks.on_beat = self._beat
        self._loop.start()

    # What the coordinator asks

    def add(
        self,
        key: ShardKey,
        runtime: StageRuntime,
        pace: ServicePace | None = None,
        claim: StageClaim | None = None,
    ) -> None:
        """Take a shard in; where its steps take clearly longer than before, or less long, that is told by `pace`. For
        receipts it signs as `claim`."""
        if not self._slots.add(key, runtime, pace, claim):
            runtime.close()

    def add_rank(
        self,
        key: ShardKey,
        runtime: StageRuntime,
        share: LoadedShare,
        leader: LateLeader,
        claim: StageClaim | None = None,
    ) -> None:
        """Take a tensor rank's share in: where it leads, as a stage that `runtime` computes."""
        if share.group.rank == 0:
            self._ranks.add(key, share, leader)
            self.add(key, runtime, claim=claim)
        else:
            self._ranks.add(key, share, None)

    def shards(self) -> dict[ShardKey, StageRuntime]:
        return self._slots.shards()

    @property
    def computed_s(self) -> float:
        """Seconds of all steps so far."""
        return self._loop.computed_s

    def kv_usages(self) -> list[KvUsage]:
        """Of all shards."""
        return [*(runtime.kv_usage() for runtime in self.shards().values()), *self._ranks.kv_usages()]

    def draft_with(self, key: ShardKey, drafter: HeadDrafter | None) -> None:
        """Let a last stage draft, after the step that may be running; None: no more."""
        runtime = self._slots.shard(key)
        if runtime is not None:
            self._loop.put(partial(runtime.draft_with, drafter))
        elif drafter is not None:
            drafter.close()

    def remove(self, key: ShardKey) -> None:
        """Free a shard, after the step that may be running."""
        self._ranks.remove(key)
        self._kv.release(key, self._slots.shard(key))
        runtime = self._slots.remove(key)
        if runtime is not None:
            self._links.keep_only(self._slots.peer_urls())
            self._loop.put(runtime.close)

    def limit_logs(self, limit_bytes: int) -> None:
        """What the activation logs of all chains may take together, at most what they were given at the start. They
        forget what is too much after the step that may be running."""
        self._log_bytes = min(limit_bytes, self._most_log_bytes)
        self._loop.put(self._share_logs)

    def _share_logs(self) -> None:
        logs, log_bytes = self._slots.logs(), self._log_bytes
        self._kept_rows.limit(log_bytes // 4)
        used_bytes = sum(each.used_bytes for each in logs)
        for each in logs:
            each.limit(log_bytes // len(logs))
        if sum(each.used_bytes for each in logs) < used_bytes:
            return_freed_memory()

    def connect(self, command: Connect) -> Connected:
        """Let a shard take part in its chain's new epoch and open the link to whoever comes next.

        Sessions of the epoch before are forgotten, and replayed by the driver, unless it keeps them. Where it
        replays, the next stage, which must be connected, is sent all that the log has. Raises LinkError, and
        BackendError where the computing thread is stuck.
        """
        received = self._kv.take(command)
        slot, goes_on = self._slots.place(command, received)
        self._loop.put(self._share_logs)
        if command.ranks:
            # Whoever computes in the group before is woken.
            slot.ranks = self._ranks.begin(command)
        if received is not None:
            self._loop.put(received.install)
        elif not goes_on:
            self._loop.put(slot.runtime.reset)
        # A computing thread that waits to send to a peer of before would never come to the rest.
        self._links.keep_only(self._slots.peer_urls())
        self._links.open(command.next)
        if not command.is_last:
            self._links.open(command.driver)
        group = None if slot.ranks is None else self._ranks.meet(slot.ranks)
        wanted = _goes_on_in(command) if command.replays and goes_on else None

        def join() -> Connected:
            self._lead(slot, group)
            return self._take_stock(slot, goes_on, wanted)

        return self._loop.perform(join)

    def _take_stock(self, slot: StageSlot, goes_on: bool, wanted: Callable[[int], bool] | None) -> Connected:
        """What is known here, after all that came before; `wanted` sessions are also told to the new next stage."""
        held = slot.runtime.session_lengths() if goes_on else {}
        replayed = {} if wanted is None else self._output.replay(slot, wanted, self._loop.trace.advance)
        return Connected(goes_on, replayed, held, slot.limits())

    def check_not_stuck(self) -> None:
        """BackendError where the computing thread is at one thing for longer than that can take."""
        self._loop.check_not_stuck()

    def trace(self, command: TraceStep) -> StepTraced:
        """Where a frame is, and how the computing thread is getting on."""
        traced, slot = self._loop.trace.find(command), self._slots.slot(command.chain)
        if slot is None:
            return traced
        route = slot.route
        to = route.drivers.get(command.session_namespace) if route.is_last else route.next
        return msgspec.structs.replace(traced, unsent=0 if to is None else self._links.backlog(to))

    def show_rows(self, command: ShowRows) -> ShownRows:
        """What was sent of an answer that is over, for an audit. UsageError: it is not kept any more."""
        return self._kept_rows.show(command)

    def redial(self, command: Redial) -> None:
        """End the link to a peer, and report it as one that broke. LinkError where there is none."""
        if not self._links.end(command.node):
            raise LinkError(f"there is no link to {command.node}")

    def unreachable(self) -> set[str]:
        """The nodes to which the frames of current epochs should go and cannot."""
        lost = {peer.node for peer in self._slots.expected_peers() if not self._links.has(peer)}
        return lost | self._ranks.unreachable()

    def admit(self, command: Admit) -> Connected:
        """Take another driver's frames too, or change its share; answers with what is held of its sessions.

        Raises LinkError where it cannot be reached, or the epoch is over.
        """
        slot = self._slots.admit(command)
        self._links.open(command.driver)
        namespace = command.session_namespace
        return self._loop.perform(lambda: Connected(True, {}, slot.held(namespace), slot.limits()))

    def dismiss(self, chain: str, namespace: int) -> None:
        """A driver is gone: take nothing more of its sessions and free what they hold."""
        slot = self._slots.dismiss(chain, namespace)
        if slot is not None:
            # A computing thread that waits to send to it would never come to the rest.
            self._links.keep_only(self._slots.peer_urls())
            self._loop.put(partial(slot.free, namespace))

    def fence(self, chain: str, epoch: int, *, forgets: bool = False) -> None:
        """Drop frames of this epoch and earlier ones, and perhaps what is left of their sessions."""
        self._ranks.fence(chain, epoch)
        self._slots.fence(chain, epoch)
        # From here on none of its frames is computed.
        self._kv.seal(chain, epoch)
        slot = self._slots.forget(chain, epoch) if forgets else None
        if slot is not None:
            self._loop.put(slot.runtime.reset)
            self._links.keep_only(self._slots.peer_urls())

    # Sessions that move with their KV

    def expect_kv(self, command: ExpectKv) -> None:
        """Take what others send of the sessions of a shard that is loaded and not in use. LinkError: it cannot."""
        runtime = self._slots.shard((command.chain, command.start, command.stop, None))
        slot = self._slots.slot(command.chain)
        if slot is not None and slot.runtime is runtime:
            raise LinkError(f"layers {command.start} to {command.stop} of {command.chain} are in use here")
        self._kv.expect(command, runtime)

    def send_kv(self, command: SendKv) -> None:
        """Send others what sessions hold here, until the epoch is fenced off. LinkError: nothing is sent."""
        slot = self._slots.slot(command.chain)
        keys = [] if slot is None else self._slots.keys_of(slot)
        if slot is None or slot.route.epoch != command.epoch or not keys or slot.ranks is not None:
            raise LinkError(f"epoch {command.epoch} of chain {command.chain} is not computed here alone")
        self._kv.send(command, slot.runtime, range(*keys[0][1:3]))

    def open_links(self, command: OpenLinks) -> None:
        """Links that are needed soon; one that cannot be opened is missed when it is."""
        for peer in command.peers[:_MOST_PEERS]:
            with contextlib.suppress(LinkError):
                self._links.open(peer)

    def serve_kv(self, link: Link) -> None:
        """Sessions that another worker sends."""
        self._kv.serve(link)

    def _writes(
        self, runtime: StageRuntime, work: Sequence[SessionRows], openings: Sequence[Opening]
    ) -> None:
        self._kv.wrote(runtime, work, openings)

    # What links bring

    def take(self, message: Message, body: memoryview, sender: str) -> None:
        """A message that node `sender` sent. Only the stage before and the driver of its chain are heard, and of
        them only frames and the ends of sessions."""
        if isinstance(message, StepFrame):
            self._loop.take_frame(message, body, sender)
        elif isinstance(message, SessionClose):
            self._loop.end_sessions(message, sender)
        elif isinstance(message, SessionCommit):
            self._loop.put(partial(self._commit_session, message, sender))

    def _sessions_ended(self, slot: StageSlot, message: SessionClose) -> None:
        self._receipts.forget(message.chain, message.sessions)
        if not slot.route.is_last:
            self._links.send(slot.route.next, message)

    def _commit_session(self, message: SessionCommit, sender: str) -> None:
        """Sign for what is kept of a session, after all that came before, and pass that on."""
        slot = self._slots.slot(message.chain)
        if slot is None or message.epoch != slot.route.epoch:
            return
        owner = slot.route.owner([message.session])
        if owner is None or not slot.route.may_end(sender, [message.session]):
            return
        self._receipts.commit(message, owner)
        if message.is_over and slot.claim is not None:
            nonce, sent = slot.log.all_sent(message.session)
            if nonce:
                self._kept_rows.keep(id_of(nonce), slot.claim.start, sent)
        if not slot.route.is_last:
            self._links.send(slot.route.next, message)

    # Ranks

    def _lead(self, slot: StageSlot, group: FabricGroup | None) -> None:
        """Lead a group that has just been formed, if this is a stage of several ranks."""
        leader = None if slot.ranks is None else self._ranks.leader(slot.ranks.place)
        if slot.ranks is None or group is None or leader is None:
            return
        try:
            leader.bind(group)
        except CollectiveError as error:
            self._ranks.failed(slot.ranks, error)
            raise

    def _beat(self, meeting: RankMeeting) -> None:
        def keep_waiting() -> None:
            leader, slot = self._ranks.leader(meeting.place), self._slots.slot(meeting.chain)
            if leader is None or slot is None or slot.ranks is not meeting or meeting.over.is_set():
                return
            try:
                leader.keep_waiting()
            except CollectiveError as error:
                self._ranks.failed(meeting, error)

        if not self._loop.has_work:
            self._loop.put(keep_waiting)

    def close(self) -> None:
        self._slots.close()
        self._kv.close()
        self._loop.end()
        self._ranks.close()
        self._links.close()
        if self._loop.join():
            self._receipts.close()
            for runtime in self._slots.remove_all():
                runtime.close()


def _goes_on_in(command: Connect) -> Callable[[int], bool]:
    """Which sessions are to go on in a new epoch: those that run and, of other drivers, all."""
    running, namespace = frozenset(command.running), command.session_namespace
    return lambda session: session in running or namespace_of(session) != namespace
