"""Hosted drivers as the coordinator sees them: which worker drives a chain, what it was handed, and how that goes on
here where it fails."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from shardcompute.core.errors import LinkError, ShardComputeError, rebuild_error
from shardcompute.core.fields import shorten
from shardcompute.core.generation import Delta, GenerationRequest, Interruption, TokenChoice
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.generation import Emit
from shardcompute.node.driver.limits import DriverLoad
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.rpc.outbox import Outbox
from shardcompute.wire import Link, Message, StageTiming
from shardcompute.wire.generations import (
    RELEASED,
    Begun,
    CancelGeneration,
    Generate,
    Generated,
    GenerationFailed,
    HostLoad,
    ReceiptMade,
    StepTimed,
    pack_request,
    patches_in,
    unpack_delta,
)

log = logging.getLogger(__name__)
_MOST_CHAINS = 64
_timings = msgspec.msgpack.Decoder(list[StageTiming])
Take = Callable[[Delta | ShardComputeError | None], None]
"""Told each delta, or at last an error; or None: nothing more comes, go on elsewhere."""
OnSession = Callable[[int], None]
"""Told under which number the chain's stages know a generation."""


@dataclass(frozen=True, slots=True)
class _Handed:
    chain: str
    take: Take
    on_session: OnSession


class HostedDriverClient:
    """One worker's driver over one link. Methods may be called from any thread, and none of them waits for it."""

    def __init__(
        self,
        node: str,
        link: Link,
        on_lost: Callable[[HostedDriverClient], None],
        on_step: Callable[[HostedDriverClient, str, Sequence[StageTiming]], None],
        name: str = "",
        on_receipt: Callable[[str, bytes], None] = lambda receipt, packed: None,
    ) -> None:
        self.node = node
        self._on_receipt = on_receipt
        self.name = name or node
        self.is_lost = False
        self._on_lost = on_lost
        self._on_step = on_step
        self._loads: dict[str, HostLoad] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._handed: dict[int, _Handed] = {}
        self._outbox = Outbox(link, self._heard, self._ended)
        self._outbox.start()

    def submit(self, chain: str, request: GenerationRequest, take: Take, on_session: OnSession) -> int:
        """Hand a request over; raises LinkError where the link has ended."""
        packed, patches = pack_request(request), patches_in(request)
        with self._lock:
            if self.is_lost:
                raise LinkError(f"the link to the driver on {self.node} has ended")
            number = next(self._numbers)
            self._handed[number] = _Handed(chain, take, on_session)
            # Before anybody can cancel it.
            self._outbox.put(Generate(number, chain, packed, list(map(len, patches))), patches)
        return number

    def cancel(self, number: int) -> None:
        """Nothing more of it is told."""
        with self._lock:
            known = self._handed.pop(number, None)
        if known is not None:
            self._outbox.put(CancelGeneration(number))

    def count(self, chain: str) -> int:
        """How many of a chain's generations are there."""
        with self._lock:
            return sum(handed.chain == chain for handed in self._handed.values())

    def load(self, chain: str) -> HostLoad | None:
        """How busy it was lately, and what its router knows; None before it has said so."""
        with self._lock:
            return self._loads.get(chain)

    def take_back(self, chain: str) -> None:
        """Have everything of a chain go on elsewhere."""
        with self._lock:
            numbers = [number for number, handed in self._handed.items() if handed.chain == chain]
            back = [self._handed.pop(number).take for number in numbers]
        for number in numbers:
            self._outbox.put(CancelGeneration(number))
        for take in back:
            take(None)

    def close(self) -> None:
        self._outbox.close()

    def _heard(self, message: Message, body: memoryview) -> None:
        if isinstance(message, Generated):
            delta = unpack_delta(message.delta)
            take = self._taker(message.number, is_last=delta.finish is not None)
            if take is not None:
                take(delta)
        elif isinstance(message, GenerationFailed):
            take = self._taker(message.number, is_last=True)
            if take is not None:
                take(
                    None
                    if message.code == RELEASED
                    else rebuild_error(message.code, shorten(message.message), shorten(message.hint))
                )
        elif isinstance(message, Begun):
            with self._lock:
                handed = self._handed.get(message.number)
            if handed is not None:
                handed.on_session(message.session)
        elif isinstance(message, StepTimed):
            self._on_step(self, message.chain, _timings_of(message))
        elif isinstance(message, ReceiptMade):
            self._on_receipt(message.receipt, message.content)
        elif isinstance(message, HostLoad):
            with self._lock:
                # Of no more chains than it was given, whatever it says.
                if message.chain in self._loads or len(self._loads) < _MOST_CHAINS:
                    self._loads[message.chain] = message
        else:
            raise LinkError(f"{type(message).__name__} came on a link for generations")

    def _taker(self, number: int, *, is_last: bool) -> Take | None:
        with self._lock:
            known = self._handed.pop(number, None) if is_last else self._handed.get(number)
        return None if known is None else known.take

    def _ended(self, error: LinkError) -> None:
        log.info("the link to the driver on %s ended: %s", self.node, error.message)
        with self._lock:
            self.is_lost = True
            left, self._handed = list(self._handed.values()), {}
        for handed in left:
            handed.take(None)
        self._on_lost(self)


class HostedDrivers:
    """Which workers host drivers of which chains. Methods may be called from any thread."""

    def __init__(self, dial: Callable[[Peer], Link], on_lost: Callable[[str, str], None]) -> None:
        """`on_lost` hears of a chain and the node that hosted its driver, when the link there ended."""
        self._dial = dial
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._hosts: dict[str, HostedDriverClient] = {}
        self._is_closed = False
        self.on_step: Callable[[str, Sequence[StageTiming]], None] = lambda chain, timings: None
        """Hears how the stages of a chain that is driven elsewhere spent their time on a step."""
        self.on_receipt: Callable[[str, bytes], None] = lambda receipt, packed: None
        """Hears of receipts that were made elsewhere."""

    def host(self, chain: str, node: str, url: str, name: str = "") -> None:
        """From now on generations of this chain go there; people know the node by this name. Raises LinkError."""
        with self._lock:
            known = next(
                (host for host in self._hosts.values() if host.node == node and not host.is_lost), None
            )
        host = known or HostedDriverClient(
            node, self._dial(Peer(node, url)), self._lost, self._timed, name, self.on_receipt
        )
        with self._lock:
            former = self._hosts.get(chain)
            if not self._is_closed:
                self._hosts[chain] = host
        if self._is_closed:
            host.close()
            raise LinkError("this node is closing")
        if former is not None and former is not host:
            self._leave(chain, former)

    def unhost(self, chain: str, node: str | None = None) -> None:
        """Bring a chain's generations back from this node, or from wherever they are."""
        with self._lock:
            host = self._hosts.get(chain)
            if host is None or node not in (None, host.node):
                return
            del self._hosts[chain]
        self._leave(chain, host)

    def find(self, chain: str) -> HostedDriverClient | None:
        """Who computes a chain's generations; None: its driver here."""
        with self._lock:
            host = self._hosts.get(chain)
        return None if host is None or host.is_lost else host

    def load(
        self, chain: str, own: DriverLoad, router: Mapping[str, float]
    ) -> tuple[DriverLoad, Mapping[str, float]]:
        """How busy the drivers of a chain are, the one here and perhaps one elsewhere, and what the router knows of
        the one that gets the requests."""
        host = self.find(chain)
        if host is None:
            return own, router
        known, count = host.load(chain), host.count(chain)
        if known is None:
            return replace(own, running=own.running + count), router
        waiting = min(known.waiting, count)
        both = DriverLoad(
            own.running + count - waiting,
            own.waiting + waiting,
            own.used_tokens + known.used_tokens,
            own.capacity_tokens + known.capacity_tokens,
        )
        return both, known.router

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            hosts, self._hosts = set(self._hosts.values()), {}
        for host in hosts:
            host.close()

    def _leave(self, chain: str, host: HostedDriverClient) -> None:
        host.take_back(chain)
        with self._lock:
            is_used = host in self._hosts.values()
        if not is_used:
            host.close()

    def _timed(self, host: HostedDriverClient, chain: str, timings: Sequence[StageTiming]) -> None:
        if self.find(chain) is host:
            self.on_step(chain, timings)

    def _lost(self, host: HostedDriverClient) -> None:
        with self._lock:
            chains = [chain for chain, each in self._hosts.items() if each is host]
            for chain in chains:
                del self._hosts[chain]
        for chain in chains:
            self._on_lost(chain, host.node)


class ResumableGeneration:
    """One generation, wherever it is computed: on the worker that hosts the chain's driver, and by the own driver if
    that one fails. Sampling depends on seed and position alone, so that one goes on from the tokens that have arrived,
    and the answer is the one that it would have been.

    Methods may be called from any thread. `emit` gets deltas in order, or at last an error.
    """

    def __init__(
        self, chain: str, request: GenerationRequest, own: Driver, emit: Emit, on_session: OnSession
    ) -> None:
        self._chain = chain
        self._request = request
        self._own = own
        self._emit = emit
        self._on_session = on_session
        self._lock = threading.Lock()
        self._host: HostedDriverClient | None = None
        self._number = 0
        self._session: int | None = None
        self._is_over = False
        self._received: list[TokenChoice] = []
        self._asked_s = time.monotonic()
        self._first_token_s = self._last_token_s = 0.0
        self._lost_host = ""
        """The name of the machine that was lost with it, until that has been told."""
        self._interrupted_s = 0.0

    def start(self, host: HostedDriverClient | None) -> None:
        """Raises what `Driver.submit` does."""
        if host is not None:
            try:
                # What the host says waits until it is known whom it comes from.
                with self._lock:
                    self._number = host.submit(self._chain, self._request, self._take, self._begun)
                    self._host = host
            except LinkError as error:
                log.info("a generation stays here: %s", error.message, extra=self._log_fields())
            else:
                return
        self._submit_here(self._emit)

    def has_started(self) -> bool:
        """Whether the chain works on it yet; what a host has taken counts as such."""
        with self._lock:
            session, is_here = self._session, self._host is None
        return session is not None and (not is_here or self._own.has_started(session))

    def cancel(self) -> None:
        """Stop it and free its memory; nothing more is emitted."""
        with self._lock:
            self._is_over = True
            host, session = self._host, self._session
        if host is not None:
            host.cancel(self._number)
        elif session is not None:
            self._own.cancel(session)

    def _take(self, said: Delta | ShardComputeError | None) -> None:
        """From the host's link; None: it says nothing more."""
        with self._lock:
            if self._is_over or self._host is None:
                return
            if said is not None:
                # Under our lock, so that nothing that follows from elsewhere overtakes it.
                self._receive(said)
                return
            self._lost_host = self._host.name if self._host.is_lost and self._received else ""
            self._host = self._session = None
        self._take_over()

    def _receive(self, said: Delta | ShardComputeError) -> None:
        if isinstance(said, Delta):
            self._received.extend(said.tokens)
            self._last_token_s = time.monotonic()
            self._first_token_s = self._first_token_s or self._last_token_s
            self._interrupted_s += said.interruption.pause_s if said.interruption is not None else 0.0
            self._is_over = said.finish is not None
        else:
            self._is_over = True
        self._emit(said)

    def _begun(self, session: int) -> None:
        self._session = session
        self._on_session(session)

    def _log_fields(self) -> dict[str, object]:
        return {"request": self._request.request_id or None, "chain": self._chain}

    def _take_over(self) -> None:
        known = len(self._received)
        log.info(
            "a generation of %s goes on here after %d tokens", self._chain, known, extra=self._log_fields()
        )
        try:
            self._submit_here(self._go_on)
        except ShardComputeError as error:
            self._is_over = True
            self._emit(error)

    def _submit_here(self, emit: Emit) -> None:
        session = self._own.submit(self._request, emit, self._received)
        self._begun(session)
        if self._is_over:
            # Cancelled before its number was known.
            self._own.cancel(session)

    def _go_on(self, said: Delta | ShardComputeError) -> None:
        if isinstance(said, Delta):
            said = self._with_timings(self._with_interruption(said))
        self._emit(said)

    def _with_interruption(self, said: Delta) -> Delta:
        """The first piece after the host was lost says so, and who of its chain was."""
        if self._lost_host and said.tokens:
            known = said.interruption or Interruption((), (), 0.0, len(self._received))
            lost = tuple(dict.fromkeys((self._lost_host, *known.lost)))
            by = known.taken_over_by or ("coordinator",)
            pause_s = time.monotonic() - self._last_token_s
            said = replace(said, interruption=Interruption(lost, by, pause_s, len(self._received)))
            self._lost_host = ""
        if said.interruption is not None:
            self._interrupted_s += said.interruption.pause_s
        return said

    def _with_timings(self, said: Delta) -> Delta:
        """The driver here has seen the end of it only."""
        if said.timings is None or not self._received:
            return said
        decode_s = time.monotonic() - self._first_token_s - self._interrupted_s
        timings = replace(
            said.timings,
            queue_s=0.0,
            prefill_s=self._first_token_s - self._asked_s,
            decode_s=max(decode_s, 0.0),
            interrupted_s=self._interrupted_s,
        )
        return replace(said, timings=timings)


def _timings_of(message: StepTimed) -> list[StageTiming]:
    try:
        return _timings.decode(message.timings)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"timings cannot be read: {error}", hint="run one release on all nodes") from error
