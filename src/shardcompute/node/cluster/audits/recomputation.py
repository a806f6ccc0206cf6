"""Recomputation of a stage's rows on another machine: to that machine it is a chain of which it has a part.

It is told to load layers and to take part in a chain, gets frames and sends what comes of them on, all by the messages
that serving has. That the coordinator is driver, stage before and stage behind in one is no sign of an audit: small
chains look the same.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcompute.backends.matrix import Array
from shardcompute.control.events import AuditBegun, AuditEnded
from shardcompute.control.state import Model, Node
from shardcompute.core.errors import LinkError
from shardcompute.core.steps import Opening, Picked, SessionRows
from shardcompute.node.coordinator.coordinator import Coordinator
from shardcompute.node.coordinator.node_registry import await_answer
from shardcompute.node.rpc.commands import (
    Connect,
    Connected,
    FenceOff,
    LoadLayers,
    Peer,
    decode_connected,
)
from shardcompute.node.rpc.frames import error_of, opened_of, picked_of, segment_of
from shardcompute.node.rpc.session_ids import choose_namespace, first_session
from shardcompute.wire import Link, Message, SessionClose, StepFailed, StepFrame, StepResult, find_codec
from shardcompute.wire.codecs.mode import EXACT

_LOAD_S = 900.0
_CONNECT_S = 30.0
_STEP_S = 60.0
_MOST_CHAINS = 1 << 20
_KV_STEP = 256


def kv_tokens_for(rows: int) -> int:
    """Of memory for keys and values, as much as one answer of so many rows needs."""
    return -(-(rows + 1) // _KV_STEP) * _KV_STEP


@dataclass(frozen=True, slots=True)
class AuditedRows:
    """What is to be computed: the rows of `tokens` through layers `[start, stop)`, from `inputs` (None: the tokens).
    Of a last stage tokens are picked behind the rows from `picked_from` on, or scored where there are `targets`."""

    model: Model
    start: int
    stop: int
    opening: Opening
    tokens: tuple[int, ...]
    inputs: Array | None
    picked_from: int
    targets: tuple[int, ...] = ()
    """The tokens that were picked behind these rows."""

    @property
    def is_last(self) -> bool:
        return self.stop == self.model.layer_count


class Recomputations:
    """Those under way. `run` waits for its own; `take` may be called from any thread."""

    def __init__(self, own: Peer, coordinator: Coordinator, dial: Callable[[Peer], Link]) -> None:
        self._own = own
        self._coordinator = coordinator
        self._dial = dial
        self._lock = threading.Lock()
        self._inboxes: dict[str, tuple[str, queue.SimpleQueue[tuple[Message, memoryview]]]] = {}

    def take(self, message: Message, body: memoryview, sender: str) -> bool:
        """Whether it is a result of a recomputation, from whom that was asked."""
        with self._lock:
            node, inbox = self._inboxes.get(getattr(message, "chain", ""), ("", None))
        if inbox is None or node != sender:
            return False
        if isinstance(message, StepFrame | StepResult | StepFailed):
            inbox.put((message, body))
        return True

    def run(self, node: Node, asked: AuditedRows) -> Array | list[Picked]:
        """What this node computes. LinkError where it does not, or not in time."""
        standing_by = self._chain_of_standby(node, asked)
        if standing_by is not None:
            return self._run_as(*standing_by, node, asked)
        chain = f"{asked.model.name}#{1000 + secrets.randbelow(_MOST_CHAINS)}"
        self._coordinator.post(AuditBegun(chain, node.id, asked.start, asked.stop))
        try:
            self._load(node, chain, asked)
            return self._run_as(chain, 1, node, asked)
        finally:
            # Nobody claims the layers any more: the coordinator has them unloaded.
            self._coordinator.post(AuditEnded(chain))

    def _chain_of_standby(self, node: Node, asked: AuditedRows) -> tuple[str, int] | None:
        """A chain, and its epoch, for which this node holds the layers in reserve."""
        for chain in self._coordinator.state.live_chains(asked.model.name):
            is_held = node.has_shard(chain.id, asked.start, asked.stop)
            if is_held and chain.status == "ready" and node.id not in chain.members:
                return chain.id, chain.epoch
        return None

    def _run_as(self, chain: str, epoch: int, node: Node, asked: AuditedRows) -> Array | list[Picked]:
        inbox: queue.SimpleQueue[tuple[Message, memoryview]] = queue.SimpleQueue()
        with self._lock:
            if chain in self._inboxes:
                raise LinkError(f"another audit uses {chain}")
            self._inboxes[chain] = (node.id, inbox)
        try:
            with self._dial(Peer(node.id, node.address)) as link:
                connected = self._connect(node, chain, epoch, asked)
                return _Session(chain, epoch, connected, link, inbox, asked).run()
        finally:
            with self._lock:
                del self._inboxes[chain]
            self._coordinator.registry.ask(node.id, FenceOff(chain, epoch, forgets=True))

    def _load(self, node: Node, chain: str, asked: AuditedRows) -> None:
        model = asked.model
        sources = [
            Peer(other.id, other.address)
            for other in self._coordinator.state.nodes.values()
            if other.is_answering and other.id != node.id and any(c.model == model.name for c in other.cached)
        ]
        command = LoadLayers(
            chain=chain,
            model=model.name,
            start=asked.start,
            stop=asked.stop,
            kv_tokens=kv_tokens_for(len(asked.tokens)),
            kv_type=model.kv_type,
            backend=model.backend,
            context_length=model.context_length,
            sources=[*sources[:8], self._own],
        )
        await_answer(node.id, self._coordinator.registry.ask(node.id, command), _LOAD_S)

    def _connect(self, node: Node, chain: str, epoch: int, asked: AuditedRows) -> tuple[int, Connected]:
        namespace = choose_namespace()
        command = Connect(
            chain=chain,
            epoch=epoch,
            start=asked.start,
            stop=asked.stop,
            next=self._own,
            previous_node=self._own.node,
            driver=self._own,
            session_namespace=namespace,
            kv_tokens=kv_tokens_for(len(asked.tokens)),
            is_last=asked.is_last,
        )
        answer = await_answer(node.id, self._coordinator.registry.ask(node.id, command), _CONNECT_S)
        return first_session(namespace), decode_connected(answer)


class _Session:
    """One session of a recomputation: frames out, results in, one after the other."""

    def __init__(
        self,
        chain: str,
        epoch: int,
        connected: tuple[int, Connected],
        link: Link,
        inbox: queue.SimpleQueue[tuple[Message, memoryview]],
        asked: AuditedRows,
    ) -> None:
        self._chain = chain
        self._epoch = epoch
        self._session, answer = connected
        self._limits = answer.limits
        self._link = link
        self._inbox = inbox
        self._asked = asked

    def run(self) -> Array | list[Picked]:
        asked, arrays, picked = self._asked, [], []
        for sequence, (start, stop) in enumerate(self._pieces(), start=1):
            self._send(sequence, start, stop)
            out = self._receive(sequence)
            if isinstance(out, list):
                picked += out
            else:
                arrays.append(out)
        self._link.send(SessionClose(self._chain, [self._session], self._epoch))
        return picked if asked.is_last else np.concatenate(arrays)

    def _pieces(self) -> Sequence[tuple[int, int]]:
        """As many rows at once as the machine takes; where tokens are picked, as many as it picks."""
        asked, at, pieces = self._asked, 0, []
        count = len(asked.tokens)
        while at < count:
            is_picking = asked.is_last and at >= asked.picked_from
            most = self._limits.max_logit_rows if is_picking else self._limits.max_rows
            edge = count if is_picking or not asked.is_last else asked.picked_from
            stop = min(at + most, edge)
            pieces.append((at, stop))
            at = stop
        return pieces

    def _send(self, sequence: int, start: int, stop: int) -> None:
        asked = self._asked
        is_picking = asked.is_last and start >= asked.picked_from
        first = start - asked.picked_from
        work = SessionRows(
            self._session,
            start,
            asked.tokens[start:stop],
            stop - start if is_picking else 0,
            asked.targets[first : first + stop - start] if is_picking else (),
        )
        rows = None if asked.inputs is None else asked.inputs[start:stop]
        opening = replace(asked.opening, session=self._session)
        frame = StepFrame(
            chain=self._chain,
            epoch=self._epoch,
            sequence=sequence,
            segments=[segment_of(work)],
            rows=stop - start,
            width=0 if rows is None else rows.shape[1],
            codec="" if rows is None else EXACT,
            opens=[opened_of(opening)] if start == 0 else [],
        )
        self._link.send(frame, () if rows is None else find_codec(EXACT).encode(rows))

    def _receive(self, sequence: int) -> Array | list[Picked]:
        try:
            message, body = self._inbox.get(timeout=_STEP_S)
        except queue.Empty:
            raise LinkError(f"nothing has come back within {_STEP_S:g} s") from None
        if isinstance(message, StepFailed):
            raise LinkError(f"it failed: {error_of(message)}")
        if getattr(message, "sequence", None) != sequence:
            raise LinkError("another step came back than was sent")
        if isinstance(message, StepResult):
            return picked_of(message)
        assert isinstance(message, StepFrame)
        # The executor's rows may not change under us: a decoded body is a view of what came.
        return np.array(find_codec(message.codec).decode(body, message.rows, message.width))
