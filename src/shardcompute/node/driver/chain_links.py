"""Chain links of drivers, to stages on other machines: frames out to the first stage, results in from the last."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardcompute.core.errors import LinkError
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.steps import Frame, Opening, SessionRows
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape
from shardcompute.node.driver.receipts.collector import ReceiptCollector
from shardcompute.node.rpc.commands import Attach, Peer, StepLimits
from shardcompute.node.rpc.frames import (
    REPLAY,
    error_of,
    head_drafts_of,
    patches_of,
    picked_of,
    step_frame,
    timings_of,
)
from shardcompute.node.rpc.session_ids import namespace_of
from shardcompute.wire import (
    Body,
    Link,
    LinkPump,
    Message,
    SessionClose,
    SessionCommit,
    StageSigned,
    StageTiming,
    StepFailed,
    StepResult,
)
from shardcompute.wire.control import StepOverdue

log = logging.getLogger(__name__)
OnTimings = Callable[[str, Sequence[StageTiming]], None]
OnRing = Callable[[str, int, float, float], None]
"""Hears what many steps of a chain and epoch took, in the middle: once round, and of that on lines."""
OnOverdue = Callable[[StepOverdue], None]
"""Has a step looked for whose results are missed; returns at once."""


@dataclass(frozen=True, slots=True)
class ChainAddress:
    """One epoch of a chain, as its driver sees it."""

    chain: str
    epoch: int
    first: Peer
    nodes: tuple[str, ...]
    """All stages' nodes; results come from the last, failures from any of them."""

    def shape(self, kv_tokens: int, limits: StepLimits) -> ChainShape:
        return ChainShape(
            kv_tokens,
            len(self.nodes),
            limits.max_rows,
            limits.max_logit_rows,
            can_continue=limits.can_continue,
        )


class RemoteChain:
    """A `ChainPort` to one epoch of a chain. Sending happens in a thread, so that a slow link blocks nobody."""

    def __init__(
        self,
        address: ChainAddress,
        link: Link,
        on_lost: Callable[[ChainAddress, LinkError], None],
        on_overdue: OnOverdue,
    ) -> None:
        self.address = address
        self._on_overdue = on_overdue
        self.driver: Driver | None = None
        """Who uses it, once it is activated."""
        self._on_lost = on_lost
        self._is_closed = False
        self.is_lost = False
        self._outbox: queue.SimpleQueue[tuple[Message, Body] | None] = queue.SimpleQueue()
        self._pump = LinkPump(link, self._ignore, self._lost)
        self._pump.start()
        self._thread = threading.Thread(target=self._send_all, name=f"chain {address.chain}", daemon=True)
        self._thread.start()

    def send(self, frame: Frame) -> None:
        message = step_frame(self.address.chain, self.address.epoch, frame)
        self._outbox.put((message, patches_of(frame.openings)))

    def close_sessions(self, sessions: Sequence[int]) -> None:
        self._outbox.put((SessionClose(self.address.chain, list(sessions), self.address.epoch), ()))

    @property
    def chain(self) -> str:
        return self.address.chain

    @property
    def epoch(self) -> int:
        return self.address.epoch

    @property
    def nodes(self) -> Sequence[str]:
        return self.address.nodes

    def commit_session(self, session: int, length: int, *, is_over: bool) -> None:
        """Have every stage sign for these rows (`receipts.record.SigningPort`)."""
        self._outbox.put((SessionCommit(self.chain, self.epoch, session, length, is_over), ()))

    def replay(self, work: SessionRows, opening: Opening | None) -> None:
        self.send(Frame(REPLAY, (work,), () if opening is None else (opening,)))

    def overdue(self, frame: Frame, waited_s: float, allowed_s: float) -> None:
        namespace = namespace_of(frame.work[0].session)
        self._on_overdue(
            StepOverdue(
                self.address.chain, self.address.epoch, namespace, frame.sequence, waited_s, allowed_s
            )
        )

    def end_link(self) -> None:
        """End the link to the first stage, as if it had broken."""
        self._pump.close()

    def close(self) -> None:
        # The link first: whoever waits to send on it would wait for as long as the other side is stuck.
        self._is_closed = True
        self._pump.close()
        self._outbox.put(None)
        self._thread.join()

    def _send_all(self) -> None:
        while (queued := self._outbox.get()) is not None:
            try:
                self._pump.offer(*queued, timeout_s=None)
            except LinkError:
                return

    def _ignore(self, message: Message, body: memoryview) -> None:
        log.debug("the first stage of %s sent %s", self.address.chain, type(message).__name__)

    def _lost(self, error: LinkError) -> None:
        if not self._is_closed:
            self.is_lost = True
            self._on_lost(self.address, error)


class DriverLinks:
    """Connects drivers with their chains' current epochs. Methods may be called from any thread."""

    def __init__(
        self,
        dial: Callable[[Peer], Link],
        on_link_broken: Callable[[str], None],
        on_timings: OnTimings | None = None,
        on_overdue: OnOverdue = lambda overdue: None,
        receipts: ReceiptCollector | None = None,
        on_ring: OnRing = lambda chain, epoch, step_s, wire_s: None,
    ) -> None:
        self._dial = dial
        self._on_ring = on_ring
        self._receipts = receipts
        self._on_link_broken = on_link_broken
        self._on_overdue = on_overdue
        self._on_timings = on_timings
        self._lock = threading.Lock()
        self._limited_log = RateLimitedLog(log)
        self._ports: dict[str, RemoteChain] = {}
        self._is_closed = False

    def open(self, address: ChainAddress) -> None:
        """Dial the first stage of a new epoch. Raises LinkError."""
        try:
            link = self._dial(address.first)
        except LinkError:
            self._on_link_broken(address.first.node)
            raise
        port = RemoteChain(address, link, self._lost, self._on_overdue)
        with self._lock:
            newest = self._ports.get(address.chain)
            is_late = newest is not None and newest.address.epoch > address.epoch
            is_late = is_late or self._is_closed
            if not is_late:
                self._ports[address.chain] = port
                port.driver = None if newest is None else newest.driver
        if is_late:
            port.close()
            raise LinkError(f"epoch {address.epoch} of chain {address.chain} is over")
        if newest is not None:
            newest.close()

    def activate(self, command: Attach, driver: Driver) -> None:
        """Let the driver use the epoch that was opened; it replays what it must."""
        with self._lock:
            port = self._ports.get(command.chain)
            if port is None or port.address.epoch != command.epoch:
                raise LinkError(f"epoch {command.epoch} of chain {command.chain} is not connected")
            port.driver = driver
        shape = port.address.shape(command.kv_tokens, command.limits)
        driver.connect(port, shape, command.resumption, command.change)

    def share(self, chain: str, epoch: int, kv_tokens: int) -> None:
        """Let the driver use more or less memory from now on."""
        with self._lock:
            port = self._ports.get(chain)
        if port is None or port.driver is None or port.address.epoch != epoch or port.is_lost:
            raise LinkError(f"epoch {epoch} of chain {chain} is not connected")
        port.driver.resize(kv_tokens)

    def nodes_of(self, chain: str) -> tuple[str, ...]:
        """The stages of a chain's current epoch; none where it has none here."""
        with self._lock:
            port = self._ports.get(chain)
        return () if port is None else tuple(port.address.nodes)

    def unreachable(self) -> set[str]:
        """The first stages of current epochs to which the link has ended."""
        with self._lock:
            return {port.address.first.node for port in self._ports.values() if port.is_lost}

    def misses(self, chain: str, epoch: int, sequence: int) -> bool:
        """Whether a driver here waits for the results of a step still."""
        with self._lock:
            port = self._ports.get(chain)
        driver = None if port is None or port.address.epoch != epoch else port.driver
        return driver is not None and driver.awaits(sequence)

    def redial(self, chain: str, node: str) -> bool:
        """End the link to the first stage of a chain, and report it as one that broke; False where there is none."""
        with self._lock:
            port = self._ports.get(chain)
        if port is None or port.is_lost or port.address.first.node != node:
            return False
        port.end_link()
        return True

    def fence(self, chain: str, epoch: int) -> None:
        """This epoch is over: the driver waits for the next."""
        with self._lock:
            port = self._ports.get(chain)
            if port is None or port.address.epoch > epoch:
                return
            del self._ports[chain]
        if port.driver is not None:
            port.driver.disconnect()
        port.close()

    def forget(self, chain: str) -> None:
        """The chain will not come back."""
        with self._lock:
            port = self._ports.pop(chain, None)
        if port is not None:
            port.close()

    def take(self, message: Message, body: memoryview, sender: str) -> None:
        """A message that node `sender` sent us; heard from the stages of its chain alone."""
        if isinstance(message, StageSigned) and self._receipts is not None:
            # Also of an epoch that is over: those who are left sign for it when the next begins.
            self._receipts.take(message, sender)
        if not isinstance(message, StepResult | StepFailed):
            return
        with self._lock:
            port = self._ports.get(message.chain)
        driver = None if port is None else port.driver
        if port is None or driver is None or port.address.epoch != message.epoch:
            return
        speakers = port.address.nodes if isinstance(message, StepFailed) else port.address.nodes[-1:]
        if sender not in speakers:
            self._limited_log.warning(
                sender, "%s sent a %s for chain %s", sender, type(message).__name__, message.chain
            )
            return
        if isinstance(message, StepFailed):
            if message.sequence == REPLAY:
                driver.replay_failed(message.sessions)
            else:
                driver.step_failed(message.sequence, error_of(message))
            return
        timings = timings_of(message.timings, port.address.nodes)
        driver.take_results(message.sequence, picked_of(message), timings, head_drafts_of(message))
        if self._on_timings is not None:
            self._on_timings(message.chain, timings)
        window = driver.take_ring_window()
        if window is not None:
            self._on_ring(message.chain, message.epoch, window.step_s, window.wire_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            ports, self._ports = list(self._ports.values()), {}
        for port in ports:
            port.close()

    def _lost(self, address: ChainAddress, error: LinkError) -> None:
        log.info("the link to the first stage of %s ended: %s", address.chain, error)
        with self._lock:
            port = self._ports.get(address.chain)
        if port is not None and port.address == address and port.driver is not None:
            port.driver.disconnect()
        self._on_link_broken(address.first.node)
