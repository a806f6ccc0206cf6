"""KV sender: a stage's sessions to one that takes its layers over, in a thread of its own.

Rows are read between steps, in the thread that computes, about a MiB at a time; hashed and sent here, while steps go
on. The other side reads no faster than it writes, so that no more than a piece and what sockets hold is under way.
Having caught up, the sender follows what is written until it is told that nothing will be any more (`seal`), sends the
rest, and says so. Whatever goes wrong ends the copy, and sessions are replayed.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.node.rpc.commands import KvHolder, Peer, SendKv
from shardcompute.node.rpc.frames import opened_of
from shardcompute.node.worker.migration.ledgers import RowSpan, SendLedger
from shardcompute.runtime.stage import StageRuntime
from shardcompute.wire import KvAccepted, KvEnded, KvOffer, KvPiece, KvSealed, Link, Refused, pack_ids
from shardcompute.wire.messages import MOST_KV_BYTES

log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20
_ANSWER_S = 10.0
_FOLLOW_S = 0.05
"""How often a copy that has caught up looks for what was written: each look is short work for the thread that
computes."""
_BEAT_S = 5.0
"""How often something is said where there is nothing to send."""
_SEAL_S = 10.0
"""So long the rest may take, once nothing more is to be written."""
_LIFETIME_S = 600.0
"""So long a copy may follow a chain that does not move after all."""
_Result = TypeVar("_Result")


class Perform(Protocol):
    """Runs something in the thread that computes, after the step that may be running, and waits for it. Raises what it
    raised; LinkError where that thread has ended, BackendError where it is stuck."""

    def __call__(self, task: Callable[[], _Result], /) -> _Result: ...


@dataclass(frozen=True, slots=True)
class _ReadRows:
    rows: RowSpan
    content: memoryview
    ids: bytes
    opening: Opening | None

    def message(self) -> KvPiece:
        rows = self.rows
        return KvPiece(
            session=rows.session,
            start=rows.start,
            count=rows.stop - rows.start,
            size=self.content.nbytes,
            sha256=hashlib.sha256(self.content).digest(),
            ids=self.ids,
            opened=None if self.opening is None else opened_of(self.opening),
        )


@dataclass(slots=True)
class _Read:
    """What was read at once: pieces, sessions that are over, and how long those are that hold KV."""

    lengths: dict[int, int]
    ended: list[int]
    pieces: list[_ReadRows] = field(default_factory=list)
    size_bytes: int = 0


class KvSender:
    """Of one stage to one target. `wrote` belongs to the computing thread, the rest may be called from any."""

    def __init__(
        self,
        command: SendKv,
        target: KvHolder,
        runtime: StageRuntime,
        own: range,
        dial: Callable[[Peer], Link],
        perform: Perform,
    ) -> None:
        """`own` are the layers of `runtime`. LinkError where their rows cannot go elsewhere."""
        kv = runtime.movable_kv
        if kv is None:
            raise LinkError("what computes these layers cannot give sessions away")
        self._layers = range(max(own.start, target.start), min(own.stop, target.stop))
        row_bytes = kv.kv_bytes(len(self._layers), 1)
        if not self._layers or row_bytes > MOST_KV_BYTES:
            raise LinkError(f"no rows of layers {own} can be sent for {target.start} to {target.stop}")
        self._here = range(self._layers.start - own.start, self._layers.stop - own.start)
        self._kv, self.runtime = kv, runtime
        self._most_rows = max(1, _PIECE_BYTES // row_bytes)
        self._has_tokens = runtime.is_last
        self.chain, self.epoch, self._number = command.chain, command.epoch, command.number
        self._target, self._dial, self._perform = target.node, dial, perform
        self._ledger = SendLedger()
        self._link: Link | None = None
        self._wake = threading.Event()
        self._is_sealing = self._is_over = False
        self._sealed_s = 0.0
        self._caught_up = threading.Event()
        self._pieces = 0
        self.error: ShardComputeError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv of {command.chain}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wrote(self, work: Sequence[SessionRows], openings: Sequence[Opening]) -> None:
        """A step is about to write these rows, or to begin sessions with what others have."""
        for opening in openings:
            self._ledger.wrote(opening.session, 0)
        for part in work:
            self._ledger.wrote(part.session, part.start)

    def seal(self) -> None:
        """No step of this stage will be computed any more: send the rest, and say so."""
        if not self._is_sealing:
            self._sealed_s = time.monotonic()
        self._is_sealing = True
        self._wake.set()

    def wait_caught_up(self, quiet_s: float) -> None:
        """LinkError where the copy has failed, or came no further for so long."""
        seen = -1
        while not self._caught_up.wait(quiet_s):
            if seen == self._pieces:
                self.end(0.0)
                raise LinkError(f"{self._target.node} took nothing for {quiet_s:g} s")
            seen = self._pieces
        if self.error is not None:
            raise LinkError(self.error.message, hint=self.error.hint)

    def end(self, patience_s: float) -> None:
        """Send what is left, within so long; from then on nothing is read any more."""
        self.seal()
        if self._thread.ident is not None:
            self._thread.join(patience_s)
        self._is_over = True
        link = self._link
        if link is not None:
            link.close()

    # The thread

    def _run(self) -> None:
        try:
            with self._dial(self._target) as link:
                self._link = link
                self._offer(link)
                self._send_all(link)
        except ShardComputeError as error:
            self.error = error
            if not self._is_over:
                log.info(
                    "sessions of chain %s are not sent to %s: %s",
                    self.chain,
                    self._target.node,
                    error.message,
                )
        except Exception:
            log.exception("sending sessions of chain %s failed", self.chain)
            self.error = LinkError("sending failed", hint="the log of that worker says why")
        finally:
            self._caught_up.set()

    def _offer(self, link: Link) -> None:
        offer = KvOffer(self.chain, self._number, self._layers.start, self._layers.stop, self._kv.kv_format)
        link.send(offer)
        self._await_accepted(link)

    def _await_accepted(self, link: Link) -> None:
        try:
            answer, _ = link.receive(_ANSWER_S)
        except TimeoutError:
            raise LinkError(f"{link.peer} did not answer within {_ANSWER_S:g} s") from None
        if isinstance(answer, Refused):
            raise LinkError(f"{link.peer} refuses: {answer.reason}")
        if not isinstance(answer, KvAccepted):
            raise LinkError(f"{link.peer} answered with {type(answer).__name__}")

    def _send_all(self, link: Link) -> None:
        started = said = time.monotonic()
        while time.monotonic() - started < _LIFETIME_S:
            # Before reading: what is read after it was set is the rest.
            self._wake.clear()
            is_sealing = self._is_sealing
            read = self._perform(self._read)
            if read.ended or time.monotonic() - said > _BEAT_S:
                link.send(KvEnded(read.ended))
                said = time.monotonic()
            for piece in read.pieces:
                link.send(piece.message(), (piece.content,))
                self._pieces += 1
            if read.size_bytes >= _PIECE_BYTES:
                continue
            if is_sealing and time.monotonic() - self._sealed_s > _SEAL_S:
                raise LinkError("steps are computed here after all")
            if is_sealing and not read.pieces:
                link.send(KvSealed(read.lengths))
                self._await_accepted(link)
                return
            self._caught_up.set()
            if not is_sealing:
                self._wake.wait(_FOLLOW_S)
        raise LinkError(f"the chain has not moved for {_LIFETIME_S:g} s")

    def _read(self) -> _Read:
        """In the computing thread: about a piece's worth of what the other side lacks."""
        if self._is_over:
            raise LinkError("it was called off")
        runtime, lengths = self.runtime, self.runtime.movable_sessions()
        read = _Read(lengths, self._ledger.take_ended(lengths))
        while read.size_bytes < _PIECE_BYTES:
            rows = self._ledger.take_next(lengths, self._most_rows)
            if rows is None:
                break
            content = self._kv.read_kv(rows.session, self._here, range(rows.start, rows.stop))
            ids = runtime.tokens_of(rows.session, rows.start, rows.stop) if self._has_tokens else ()
            opening = runtime.opening_of(rows.session) if rows.start == 0 else None
            read.pieces.append(_ReadRows(rows, content, pack_ids(ids) if ids else b"", opening))
            read.size_bytes += content.nbytes
        return read
