"""Stage server, a worker's data plane: *receive, choose, step, send*, for every shard that it holds.

One thread computes for all shards. Frames come in from whoever dialled us, go out over links that we dial: to
the next stage or, from the last one, straight to the driver. Frames of an old epoch are dropped. A step that
fails is reported to the driver, and the layers are given up where that was for want of memory; a link that fails is
reported to the coordinator, which changes the chain. Where a frame is, and whether the computing thread is stuck, can
be asked at any time (`step_trace`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shardcompute.backends.executor import KvUsage
from shardcompute.backends.matrix import Array
from shardcompute.control.state import ShardPlace
from shardcompute.core.errors import (
    BackendError,
    CollectiveError,
    DeviceMemoryError,
    LinkError,
    ShardComputeError,
)
from shardcompute.core.process_memory import release_code, return_freed_memory
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.steps import Draft, SessionRows
from shardcompute.node.rpc.commands import (
    Admit,
    Connect,
    Connected,
    ExpectKv,
    Peer,
    Redial,
    SendKv,
    ShownRows,
    ShowRows,
    StepTraced,
    TraceStep,
)
from shardcompute.node.rpc.frames import openings_of, rows_to_compute, work_of
from shardcompute.node.rpc.step_times import STAGE_PATIENCE, Patience, StepTimes
from shardcompute.node.worker.activation_log import ActivationLog
from shardcompute.node.worker.migration.exchange import KvExchange
from shardcompute.node.worker.migration.receiver import ReceivedKv
from shardcompute.node.worker.peer_links import PeerLinks
from shardcompute.node.worker.ranks.groups import RankGroups, RankMeeting
from shardcompute.node.worker.receipts.kept_rows import KeptRows
from shardcompute.node.worker.receipts.stage_receipts import StageReceipts
from shardcompute.node.worker.service_pace import ServicePace, ShardPace
from shardcompute.node.worker.slot import StageRoute, StageSlot, sessions_in
from shardcompute.node.worker.stage_output import StageOutput
from shardcompute.node.worker.step_trace import StepTrace
from shardcompute.runtime.head_drafter import HeadDrafter
from shardcompute.runtime.overlap import next_item
from shardcompute.runtime.picture_encoding import PictureEncoding
from shardcompute.runtime.stage import PendingFrame, StageRuntime
from shardcompute.security.credentials import Credentials
from shardcompute.security.receipts.records import StageClaim, id_of
from shardcompute.wire import (
    Link,
    Message,
    SessionClose,
    SessionCommit,
    StageTiming,
    StepFrame,
    find_codec,
)

if TYPE_CHECKING:
    from shardcompute.collectives.fabric_group import FabricGroup
    from shardcompute.runtime.loaded_share import LateLeader, LoadedShare

log = logging.getLogger(__name__)
_WATCH_S = 1.0
_ERRAND_S = 60.0
"""So long the computing thread may be at anything but a step: freeing memory, putting in a drafter."""
_CLOSE_S = 10.0
_REST_S = 2.0
_Result = TypeVar("_Result")
ShardKey = ShardPlace
"""(chain, first layer, layer behind the last, which share of them)"""


@dataclass(frozen=True, slots=True)
class _Arrived:
    frame: StepFrame
    body: memoryview
    sender: str
    received_s: float
    is_encoded: bool = False
    """Its pictures were looked at, or it has none."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A frame whose step is under way."""

    slot: StageSlot
    arrived: _Arrived
    pending: PendingFrame
    began_s: float
    codec_s: float


@dataclass(frozen=True, slots=True)
class _Ended:
    message: SessionClose
    sender: str


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
        self._node = node
        self._ranks = ranks or RankGroups(dial, on_link_broken)
        self._ranks.on_beat = self._beat
        self._on_out_of_memory = on_out_of_memory
        self._on_pace = on_pace
        self._patience = patience
        self._rest_s = rest_s
        self._is_rested = True
        self._trace = StepTrace()
        self._links = PeerLinks(dial, on_link_broken)
        self._kv = KvExchange(dial_kv or dial, self._perform)
        self._receipts = StageReceipts(credentials, self._links.send)
        self._kept_rows = KeptRows(log_bytes // 4)
        self._output = StageOutput(self._links, self._receipts)
        self._most_log_bytes = log_bytes
        self._log_bytes = log_bytes
        self._lock = threading.Lock()
        self._limited_log = RateLimitedLog(log)
        self._runtimes: dict[ShardKey, StageRuntime] = {}
        self._times: dict[ShardKey, StepTimes] = {}
        self._paces: dict[ShardKey, ServicePace] = {}
        self._claims: dict[ShardKey, StageClaim] = {}
        self._slots: dict[str, StageSlot] = {}
        self._fences: dict[str, int] = {}
        self._is_closed = False
        self._inbox: queue.SimpleQueue[_Arrived | _Ended | Callable[[], None] | None] = queue.SimpleQueue()
        self._encoding: PictureEncoding[_Arrived | _Ended] = PictureEncoding(
            lambda: self._inbox.put(self._serve_encoded)
        )
        self._begun: _Begun | None = None
        """The step that is under way, and when the one before was done; of the computing thread alone."""
        self._done_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="stages", daemon=True)
        self._thread.start()

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
        with self._lock:
            if not self._is_closed:
                if claim is not None:
                    self._claims[key] = msgspec.structs.replace(claim, node=self._node)
                self._runtimes[key] = runtime
                self._times[key] = StepTimes(self._patience)
                if pace is not None:
                    self._paces[key] = pace
                return
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

    def kv_usages(self) -> list[KvUsage]:
        """Of all shards."""
        return [*(runtime.kv_usage() for runtime in self.shards().values()), *self._ranks.kv_usages()]

    def draft_with(self, key: ShardKey, drafter: HeadDrafter | None) -> None:
        """Let a last stage draft, after the step that may be running; None: no more."""
        with self._lock:
            runtime = self._runtimes.get(key)
        if runtime is not None:
            self._inbox.put(partial(runtime.draft_with, drafter))
        elif drafter is not None:
            drafter.close()

    def shards(self) -> dict[ShardKey, StageRuntime]:
        with self._lock:
            return dict(self._runtimes)

    def remove(self, key: ShardKey) -> None:
        """Free a shard, after the step that may be running."""
        self._ranks.remove(key)
        self._kv.release(key, self.shards().get(key))
        with self._lock:
            runtime = self._runtimes.pop(key, None)
            self._times.pop(key, None)
            self._paces.pop(key, None)
            self._claims.pop(key, None)
            slot = self._slots.get(key[0])
            if slot is not None and slot.runtime is runtime:
                del self._slots[key[0]]
        if runtime is not None:
            self._links.keep_only(self._peer_urls())
            self._inbox.put(runtime.close)

    def limit_logs(self, limit_bytes: int) -> None:
        """What the activation logs of all chains may take together, at most what they were given at the start. They
        forget what is too much after the step that may be running."""
        with self._lock:
            self._log_bytes = min(limit_bytes, self._most_log_bytes)
        self._inbox.put(self._share_logs)

    def _share_logs(self) -> None:
        with self._lock:
            logs, log_bytes = [slot.log for slot in self._slots.values()], self._log_bytes
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
        slot, goes_on = self._take_slot(command, received)
        if command.ranks:
            # Whoever computes in the group before is woken.
            slot.ranks = self._ranks.begin(command)
        if received is not None:
            self._inbox.put(received.install)
        elif not goes_on:
            self._inbox.put(slot.runtime.reset)
        # A computing thread that waits to send to a peer of before would never come to the rest.
        self._links.keep_only(self._peer_urls())
        self._links.open(command.next)
        if not command.is_last:
            self._links.open(command.driver)
        group = None if slot.ranks is None else self._ranks.meet(slot.ranks)
        done: queue.SimpleQueue[Connected | LinkError] = queue.SimpleQueue()
        replays = command.replays and goes_on
        self._inbox.put(lambda: done.put(self._join(slot, group) or self._take_stock(slot, goes_on, replays)))
        return _raised(self._await(done))

    def _take_slot(self, command: Connect, received: ReceivedKv | None) -> tuple[StageSlot, bool]:
        """The shard with its new route, and whether it goes on with its sessions."""
        chain, epoch, key = command.chain, command.epoch, command.place
        with self._lock:
            runtime = self._runtimes.get(key)
            if runtime is None:
                raise LinkError(
                    f"layers {command.start} to {command.stop} of chain {chain} are not loaded here"
                )
            if epoch < self._fences.get(chain, 0):
                raise LinkError(f"epoch {epoch} of chain {chain} is over")
            former = self._slots.get(chain)
            goes_on = command.keeps_sessions and former is not None and former.runtime is runtime
            log_ = former.log if goes_on and former is not None else ActivationLog(0)
            goes_on = goes_on or (received is not None and received.runtime is runtime)
            slot = StageSlot(chain, runtime, StageRoute.of(command), log_, self._times[key])
            slot.claim = self._claim_of(command)
            self._slots[chain] = slot
            self._fences[chain] = epoch
            self._inbox.put(self._share_logs)
        return slot, goes_on

    def _claim_of(self, command: Connect) -> StageClaim | None:
        claim = self._claims.get(command.place)
        ranks = tuple(peer.node for peer in command.ranks)
        return claim if claim is None or not ranks else msgspec.structs.replace(claim, ranks=ranks)

    def _await(self, done: queue.SimpleQueue[_Result]) -> _Result:
        """What the computing thread says; for as long as it is well."""
        while True:
            try:
                return done.get(timeout=_WATCH_S)
            except queue.Empty:
                if not self._thread.is_alive():
                    raise LinkError("this node is closing") from None
                self.check_not_stuck()

    def check_not_stuck(self) -> None:
        """BackendError where the computing thread is at one thing for longer than that can take."""
        seen = self._trace.look()
        if seen.is_stuck:
            raise BackendError(
                f"this worker has been stuck in one step for {seen.busy_s:.0f} s",
                hint="restart it; its log says with what",
            )

    def trace(self, command: TraceStep) -> StepTraced:
        """Where a frame is, and how the computing thread is getting on."""
        traced = self._trace.find(command)
        with self._lock:
            slot = self._slots.get(command.chain)
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
        with self._lock:
            routes = [
                slot.route
                for chain, slot in self._slots.items()
                if slot.route.epoch >= self._fences.get(chain, 0)
            ]
        expected = {each for route in routes for each in (route.next, *route.drivers.values())}
        return {each.node for each in expected if not self._links.has(each)} | self._ranks.unreachable()

    def _peer_urls(self) -> set[str]:
        with self._lock:
            routes = [slot.route for slot in self._slots.values()]
        return {peer.url for route in routes for peer in route.peers()}

    def admit(self, command: Admit) -> Connected:
        """Take another driver's frames too, or change its share; answers with what is held of its sessions.

        Raises LinkError where it cannot be reached, or the epoch is over.
        """
        chain, epoch, namespace = command.chain, command.epoch, command.session_namespace
        with self._lock:
            slot = self._slots.get(chain)
            if slot is None or slot.route.epoch != epoch or epoch < self._fences.get(chain, 0):
                raise LinkError(f"epoch {epoch} of chain {chain} is over")
            slot.route = slot.route.with_driver(command)
        self._links.open(command.driver)
        done: queue.SimpleQueue[Connected | LinkError] = queue.SimpleQueue()
        self._inbox.put(lambda: done.put(Connected(True, {}, slot.held(namespace), slot.limits())))
        return _raised(self._await(done))

    def dismiss(self, chain: str, namespace: int) -> None:
        """A driver is gone: take nothing more of its sessions and free what they hold."""
        with self._lock:
            slot = self._slots.get(chain)
            if slot is None:
                return
            slot.route = slot.route.without_driver(namespace)
        # A computing thread that waits to send to it would never come to the rest.
        self._links.keep_only(self._peer_urls())
        self._inbox.put(lambda: slot.free(namespace))

    def fence(self, chain: str, epoch: int, *, forgets: bool = False) -> None:
        """Drop frames of this epoch and earlier ones, and perhaps what is left of their sessions."""
        self._ranks.fence(chain, epoch)
        with self._lock:
            self._fences[chain] = max(self._fences.get(chain, 0), epoch + 1)
        # From here on none of its frames is computed.
        self._kv.seal(chain, epoch)
        with self._lock:
            slot = self._slots.get(chain)
            if not forgets or slot is None or slot.route.epoch > epoch:
                return
            del self._slots[chain]
        self._inbox.put(slot.runtime.reset)
        self._links.keep_only(self._peer_urls())

    # Sessions that move with their KV

    def expect_kv(self, command: ExpectKv) -> None:
        """Take what others send of the sessions of a shard that is loaded and not in use. LinkError: it cannot."""
        place = (command.chain, command.start, command.stop, None)
        with self._lock:
            runtime, slot = self._runtimes.get(place), self._slots.get(command.chain)
        if slot is not None and slot.runtime is runtime:
            raise LinkError(f"layers {command.start} to {command.stop} of {command.chain} are in use here")
        self._kv.expect(command, runtime)

    def send_kv(self, command: SendKv) -> None:
        """Send others what sessions hold here, until the epoch is fenced off. LinkError: nothing is sent."""
        with self._lock:
            slot = self._slots.get(command.chain)
            keys = [key for key, each in self._runtimes.items() if slot is not None and each is slot.runtime]
        if slot is None or slot.route.epoch != command.epoch or not keys or slot.ranks is not None:
            raise LinkError(f"epoch {command.epoch} of chain {command.chain} is not computed here alone")
        self._kv.send(command, slot.runtime, range(*keys[0][1:3]))

    def serve_kv(self, link: Link) -> None:
        """Sessions that another worker sends."""
        self._kv.serve(link)

    def _perform(self, task: Callable[[], _Result]) -> _Result:
        """Run something in the computing thread, and wait for it (see `migration.sender.Perform`)."""
        done: queue.SimpleQueue[tuple[_Result] | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((task(),))
            except Exception as error:
                done.put(error)

        self._inbox.put(run)
        outcome = self._await(done)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome[0]

    # What links bring

    def take(self, message: Message, body: memoryview, sender: str) -> None:
        """A message that node `sender` sent. Only the stage before and the driver of its chain are heard, and of
        them only frames and the ends of sessions."""
        if isinstance(message, StepFrame):
            self._trace.place(message, sender, "queued")
            self._inbox.put(_Arrived(message, body, sender, time.perf_counter()))
        elif isinstance(message, SessionClose):
            self._inbox.put(_Ended(message, sender))
        elif isinstance(message, SessionCommit):
            self._inbox.put(partial(self._commit_session, message, sender))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._kv.close()
        self._inbox.put(None)
        self._ranks.close()
        self._links.close()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # Its memory is freed with the process: nobody may free what a step is computing with.
            log.warning("a step has not ended within %g s; this worker closes without it", _CLOSE_S)
            return
        with self._lock:
            runtimes, self._runtimes = list(self._runtimes.values()), {}
        self._receipts.close()
        for runtime in runtimes:
            runtime.close()

    # The computing thread

    def _serve(self) -> None:
        while True:
            came = self._next_item()
            try:
                if came is None:
                    self._finish_begun()
                elif came[0] is None:
                    self._finish_begun()
                    return
                else:
                    self._serve_item(came[0])
            except LinkError as error:
                log.warning("a frame could not be passed on: %s", error)
            except Exception:
                # One bad message must not end the work of all shards.
                log.exception("a message of the chain could not be served")

    def _next_item(self) -> tuple[_Arrived | _Ended | Callable[[], None] | None] | None:
        begun = self._begun
        if begun is not None:
            allowed_s = begun.slot.allowed_s(rows_to_compute(begun.arrived.frame))
            return next_item(self._inbox, begun.pending, allowed_s)
        if not self._is_rested:
            try:
                return (self._inbox.get(timeout=self._rest_s),)
            except queue.Empty:
                self._rest()
        return next_item(self._inbox, None)

    def _rest(self) -> None:
        self._is_rested = True
        try:
            for runtime in self.shards().values():
                runtime.rest()
            return_freed_memory()
            release_code()
        except Exception:
            log.exception("memory could not be given back")

    def _serve_item(self, item: _Arrived | _Ended | Callable[[], None]) -> None:
        self._is_rested = False
        if isinstance(item, _Arrived):
            self._serve_frame(item)
            return
        if not isinstance(item, _Ended):
            self._finish_begun()
        with self._trace.busy(_ERRAND_S):
            if isinstance(item, _Ended):
                if not self._encoding.holds(item, item.message.sessions):
                    self._close_sessions(item)
            else:
                item()

    def _slot_for(self, arrived: _Arrived) -> StageSlot | None:
        """Where a frame is to be computed; None if it is too late, or from somebody who is not heard."""
        frame = arrived.frame
        with self._lock:
            slot = self._slots.get(frame.chain)
            is_stale = frame.epoch < self._fences.get(frame.chain, 0)
        if slot is None or is_stale or frame.epoch != slot.route.epoch:
            return None
        if slot.ranks is not None and slot.ranks.has_ended:
            # It may go on from what a step was to pick that fell with the group. All comes again in the next epoch.
            return None
        if not slot.route.hears(arrived.sender, sessions_in(frame), is_replay=frame.replay):
            self._limited_log.warning(
                arrived.sender,
                "%s sent a frame for chain %s, in which it has no such place",
                arrived.sender,
                frame.chain,
            )
            return None
        return None if slot.is_outdated(frame) else slot

    def _serve_frame(self, arrived: _Arrived) -> None:
        frame, slot = arrived.frame, self._slot_for(arrived)
        if slot is None:
            self._trace.place(frame, arrived.sender, "dropped")
            return
        begun = self._begun
        if begun is not None and not (
            begun.slot.runtime is slot.runtime and slot.runtime.can_begin_after(begun.pending)
        ):
            self._finish_begun()
        self._trace.place(frame, arrived.sender, "computing")
        if not arrived.is_encoded and self._waits_for_pictures(slot, arrived):
            return
        with self._trace.busy(slot.allowed_s(rows_to_compute(frame))):
            following = self._begin(slot, arrived)
        try:
            self._finish_begun()
        finally:
            self._begun = following
        if following is not None and not slot.runtime.can_begin_after(following.pending):
            self._finish_begun()

    def _waits_for_pictures(self, slot: StageSlot, arrived: _Arrived) -> bool:
        """Whether a frame is for later: a tower has to look at its pictures, or at those of a frame before it."""
        encode = None
        if any(opened.pictures for opened in arrived.frame.opens):
            # What is wrong with them is for the step to say.
            with contextlib.suppress(ShardComputeError):
                encode = slot.runtime.encoding(openings_of(arrived.frame, arrived.body))
        return self._encoding.holds(arrived, sessions_in(arrived.frame), encode)

    def _serve_encoded(self) -> None:
        """Go on with what has waited for pictures."""
        for item in self._encoding.take_ready():
            self._serve_item(item if isinstance(item, _Ended) else replace(item, is_encoded=True))

    def _begin(self, slot: StageSlot, arrived: _Arrived) -> _Begun | None:
        """Begin a step; None where that failed, and was reported."""
        frame = arrived.frame
        started = time.perf_counter()
        try:
            slot.check_share(frame)
            work = [work_of(segment) for segment in frame.segments]
            openings = openings_of(frame, arrived.body)
            activations = self._decode(frame, arrived.body)
            decoded = time.perf_counter()
            for opening in openings:
                self._log_session("begins", opening.session, frame.chain)
            self._kv.wrote(slot.runtime, work, openings)
            pending = slot.runtime.begin(work, openings, activations)
        except CollectiveError as error:
            self._parted(slot, frame, arrived.sender, error)
            return None
        except Exception as error:
            self._trace.place(frame, arrived.sender, "failed")
            self._output.report_failure(slot, frame, error)
            if isinstance(error, DeviceMemoryError):
                self._give_up(slot, error)
            return None
        return _Begun(slot, arrived, pending, decoded, decoded - started)

    def _finish_begun(self) -> None:
        """Finish the step that is under way, if there is one, and send what it brings."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with self._trace.busy(begun.slot.allowed_s(rows_to_compute(begun.arrived.frame))):
                self._finish(begun)

    def _finish(self, begun: _Begun) -> None:
        slot, frame, sender = begun.slot, begun.arrived.frame, begun.arrived.sender
        pending = begun.pending
        # Behind another step it waited for the device.
        started = max(begun.began_s, self._done_s)
        try:
            out = slot.runtime.finish(pending)
            self._done_s = computed = time.perf_counter()
            if rows_to_compute(frame) == frame.rows:
                slot.times.observe(frame.rows, computed - started)
                self._observe_pace(slot, pending.work, computed - started)
            drafts: list[Draft] = []
            if isinstance(out, list):
                slot.runtime.remember(pending.work, out)
            drafting = time.perf_counter()
            if isinstance(out, list) and not frame.replay:
                drafts = slot.runtime.draft(pending.work)
            timing = StageTiming(
                self._node,
                started - begun.codec_s - begun.arrived.received_s,
                computed - started,
                begun.codec_s,
                len(begun.arrived.body),
                draft_s=time.perf_counter() - drafting,
                **self._exchanges(slot),
            )
            body = begun.arrived.body
            send = self._output.of_step(
                slot, frame, pending.work, pending.openings, out, drafts, timing, body
            )
        except CollectiveError as error:
            self._parted(slot, frame, sender, error)
            return
        except Exception as error:
            self._trace.place(frame, sender, "failed")
            self._output.report_failure(slot, frame, error)
            if isinstance(error, DeviceMemoryError):
                self._give_up(slot, error)
            return
        self._trace.place(frame, sender, "sending")
        try:
            send()
        except Exception:
            self._trace.place(frame, sender, "dropped")
            raise
        self._trace.place(frame, sender, "sent")

    # Ranks

    def _join(self, slot: StageSlot, group: FabricGroup | None) -> LinkError | None:
        """Lead a group that has just been formed; what it failed with, or None."""
        leader = None if slot.ranks is None else self._ranks.leader(slot.ranks.place)
        if slot.ranks is None or group is None or leader is None:
            return None
        try:
            leader.bind(group)
        except CollectiveError as error:
            self._ranks.failed(slot.ranks, error)
            return error
        return None

    def _parted(self, slot: StageSlot, frame: StepFrame, sender: str, error: CollectiveError) -> None:
        """The group has ended in a step: no fault of the step, which comes again in the next epoch."""
        self._trace.place(frame, sender, "dropped")
        if slot.ranks is not None:
            self._ranks.failed(slot.ranks, error)

    def _beat(self, meeting: RankMeeting) -> None:
        def keep_waiting() -> None:
            leader = self._ranks.leader(meeting.place)
            with self._lock:
                slot = self._slots.get(meeting.chain)
            if leader is None or slot is None or slot.ranks is not meeting or meeting.over.is_set():
                return
            try:
                leader.keep_waiting()
            except CollectiveError as error:
                self._ranks.failed(meeting, error)

        if self._inbox.empty():
            self._inbox.put(keep_waiting)

    def _exchanges(self, slot: StageSlot) -> dict[str, Any]:
        """What a step's exchanges took, and who was waited for most of late."""
        leader = None if slot.ranks is None else self._ranks.leader(slot.ranks.place)
        if slot.ranks is None or leader is None:
            return {}
        slowest = "" if leader.slowest is None else slot.ranks.peers[leader.slowest].node
        return {"exchange_s": leader.exchange_s, "slowest": slowest}

    def _log_session(self, what: str, session: int, chain: str) -> None:
        """Stages know sessions by number alone; which request one belongs to is in the log of its driver."""
        extra = {"session": session, "chain": chain}
        log.debug("session %d of chain %s %s", session, chain, what, extra=extra)

    def _decode(self, frame: StepFrame, body: memoryview) -> Array | None:
        if frame.width == 0:
            return None
        return find_codec(frame.codec).decode(body, frame.rows, frame.width)

    def _take_stock(self, slot: StageSlot, goes_on: bool, replays: bool) -> Connected | LinkError:
        """What is known here, after all that came before; for the new next stage, also told to it."""
        held = slot.runtime.session_lengths() if goes_on else {}
        try:
            replayed = self._output.replay(slot, self._trace.advance) if replays else {}
            return Connected(goes_on, replayed, held, slot.limits())
        except LinkError as error:
            return error

    def _observe_pace(self, slot: StageSlot, work: Sequence[SessionRows], seconds: float) -> None:
        with self._lock:
            paces = [
                (key, pace) for key, pace in self._paces.items() if self._runtimes.get(key) is slot.runtime
            ]
        for key, pace in paces:
            context = sum(part.start * len(part.ids) for part in work)
            changed = pace.observe(sum(len(part.ids) for part in work), context, seconds, self._done_s)
            if changed is not None:
                self._on_pace(key, changed)

    def _give_up(self, slot: StageSlot, error: DeviceMemoryError) -> None:
        """What could be freed was, and a step has no memory still: others are to compute these layers."""
        with self._lock:
            keys = [key for key, runtime in self._runtimes.items() if runtime is slot.runtime]
        for key in keys:
            self._on_out_of_memory(key, error)

    def _close_sessions(self, ended: _Ended) -> None:
        message = ended.message
        with self._lock:
            slot = self._slots.get(message.chain)
        # Of an old epoch it may be news of a session that has begun again since.
        is_current = slot is not None and message.epoch in (0, slot.route.epoch)
        if slot is not None and is_current and slot.route.may_end(ended.sender, message.sessions):
            for session in message.sessions:
                self._log_session("has ended", session, message.chain)
            slot.close(message.sessions)
            self._receipts.forget(message.chain, message.sessions)
            if not slot.route.is_last:
                self._links.send(slot.route.next, message)

    def _commit_session(self, message: SessionCommit, sender: str) -> None:
        """Sign for what is kept of a session, after all that came before, and pass that on."""
        with self._lock:
            slot = self._slots.get(message.chain)
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


def _raised(answer: Connected | LinkError) -> Connected:
    if isinstance(answer, LinkError):
        raise answer
    return answer
