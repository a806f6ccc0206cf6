"""Receipts at a stage: digests of what came in and went out, off the thread that computes.

The computing thread hands over what it has anyway, the body of a frame and the rows that were sent on; a thread of
its own hashes and signs, and tells the session's driver. Sessions that want no receipt cost one look at a set. Where
the thread falls behind by more than it may hold, it gives up the receipts of those sessions: no step ever waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from shardcompute.backends.matrix import Array
from shardcompute.core.errors import LinkError
from shardcompute.core.steps import Opening, Picked, SessionRows
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.worker.activation_log import Chunk
from shardcompute.security.credentials import Credentials
from shardcompute.security.receipts.records import (
    BlockCommitment,
    StageClaim,
    StageTranscript,
    TranscriptHeader,
    id_of,
    id_row,
)
from shardcompute.security.receipts.tape import NO_PICK, SessionTape
from shardcompute.wire import Message, SessionCommit, StageSigned, StepFrame, find_codec

log = logging.getLogger(__name__)
_MOST_WAITING_BYTES = 256 << 20
_MOST_TAPES = 1024
_MOST_TOLD = 4
"""Commitments in one message."""
_CLOSE_S = 5.0
_Key = tuple[str, int]
"""(chain, session)"""


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step as it was computed: `body` came in with `frame`, `out` went out."""

    frame: StepFrame
    body: memoryview
    work: Sequence[SessionRows]
    openings: Sequence[Opening]
    out: Chunk | list[Picked]
    claim: StageClaim
    driver: Peer | None
    """Whose sessions these are; None: it is yet to come back."""

    @property
    def size_bytes(self) -> int:
        return self.body.nbytes + (self.out.rows.nbytes if isinstance(self.out, Chunk) else 0)


@dataclass(frozen=True, slots=True)
class _SessionCut:
    message: SessionCommit
    driver: Peer


@dataclass(slots=True)
class _OpenTape:
    tape: SessionTape
    unsent: list[BlockCommitment] = field(default_factory=list)


class StageReceipts:
    """Of all stages of a worker. `computed`, `commit` and `forget` are for the computing thread."""

    def __init__(
        self, credentials: Callable[[], Credentials] | None, send: Callable[[Peer, Message], None]
    ) -> None:
        """Without `credentials` nothing is signed for."""
        self._credentials = credentials
        self._send = send
        self._wanted: set[_Key] = set()
        self._tapes: OrderedDict[_Key, _OpenTape] = OrderedDict()
        self._inbox: queue.SimpleQueue[StepRows | _SessionCut | list[_Key] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None

    # The computing thread

    def concerns(self, chain: str, work: Sequence[SessionRows], openings: Sequence[Opening]) -> bool:
        """Whether a step has rows of answers that are to have a receipt."""
        if self._credentials is None:
            return False
        for opening in openings:
            if opening.receipt_nonce:
                self._wanted.add((chain, opening.session))
        return bool(self._wanted) and any((chain, part.session) in self._wanted for part in work)

    def computed(self, rows: StepRows) -> None:
        """Such a step is done; what it was computed from and what came of it stays as it is."""
        chain = rows.frame.chain
        with self._lock:
            has_room = self._waiting_bytes + rows.size_bytes <= _MOST_WAITING_BYTES
            self._waiting_bytes += rows.size_bytes if has_room else 0
        if not has_room:
            log.warning("receipts fall behind: those of %d sessions are given up", len(rows.work))
            self.forget(chain, [part.session for part in rows.work])
            return
        self._put(rows)

    def commit(self, message: SessionCommit, driver: Peer) -> None:
        """Sign for what is kept of a session, and tell the driver."""
        if message.is_over:
            self._wanted.discard((message.chain, message.session))
        if self._credentials is not None:
            self._put(_SessionCut(message, driver))

    def forget(self, chain: str, sessions: Sequence[int]) -> None:
        """These sessions are over."""
        known = [key for key in ((chain, session) for session in sessions) if key in self._wanted]
        if known:
            self._wanted.difference_update(known)
            self._put(known)

    def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(_CLOSE_S)

    def _put(self, item: StepRows | _SessionCut | list[_Key]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="receipts", daemon=True)
            self._thread.start()
        self._inbox.put(item)

    # The thread that signs

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None:
            try:
                if isinstance(item, StepRows):
                    try:
                        self._write(item)
                    finally:
                        with self._lock:
                            self._waiting_bytes -= item.size_bytes
                elif isinstance(item, _SessionCut):
                    self._cut(item)
                else:
                    for key in item:
                        self._tapes.pop(key, None)
            except LinkError as error:
                log.info("a driver was not told what was signed: %s", error)
            except Exception:
                # Answers go on without their receipts.
                log.exception("a step could not be signed for")

    def _write(self, step: StepRows) -> None:
        frame = step.frame
        for opening in step.openings:
            if opening.receipt_nonce:
                self._open(opening, step)
        first, came, sent = 0, _came(step), _sent(step)
        for part in step.work:
            span = slice(first, first + len(part.ids))
            first = span.stop
            known = self._tapes.get((frame.chain, part.session))
            if known is None:
                continue
            ids = list(part.ids)
            known.unsent += known.tape.write(
                part.start,
                frame.sequence,
                frame.epoch,
                ids,
                [id_row(each) for each in ids] if came is None else _digests(came[span]),
                _picks(part, sent) if isinstance(sent, dict) else _digests(sent[span]),
                self._sign,
                is_replay=frame.replay,
            )
            if known.unsent and step.driver is not None:
                self._tell(frame.chain, part.session, known, step.driver, is_over=False)

    def _open(self, opening: Opening, step: StepRows) -> None:
        header = TranscriptHeader(
            receipt=id_of(opening.receipt_nonce),
            chain=step.frame.chain,
            session=opening.session,
            adapter=opening.adapter,
            opened_epoch=step.frame.epoch,
            opened_frame=step.frame.sequence,
            claim=step.claim,
        )
        self._tapes[step.frame.chain, opening.session] = _OpenTape(SessionTape(header))
        while len(self._tapes) > _MOST_TAPES:
            self._tapes.popitem(last=False)

    def _cut(self, cut: _SessionCut) -> None:
        message = cut.message
        key = (message.chain, message.session)
        known = self._tapes.pop(key, None) if message.is_over else self._tapes.get(key)
        if known is not None:
            known.unsent += known.tape.cut(message.length, self._sign)
            self._tell(message.chain, message.session, known, cut.driver, is_over=message.is_over)
        elif message.is_over:
            # Nobody has to wait for what will not come.
            self._send(cut.driver, StageSigned(message.chain, message.session, b"", "", is_over=True))

    def _tell(self, chain: str, session: int, known: _OpenTape, driver: Peer, *, is_over: bool) -> None:
        unsent, known.unsent = known.unsent, []
        certificate = self._own().certificate_pem
        parts = [unsent[at : at + _MOST_TOLD] for at in range(0, len(unsent), _MOST_TOLD)] or [[]]
        for index, part in enumerate(parts):
            packed = msgspec.msgpack.encode(StageTranscript(header=known.tape.header, commitments=part))
            is_last = is_over and index == len(parts) - 1
            self._send(driver, StageSigned(chain, session, packed, certificate, is_last))

    def _own(self) -> Credentials:
        assert self._credentials is not None
        return self._credentials()

    def _sign(self, message: bytes) -> bytes:
        return self._own().identity.sign(message)


def _came(step: StepRows) -> Array | None:
    """The activations that came in, as every stage would read them; None: token ids did."""
    frame = step.frame
    if frame.width == 0:
        return None
    return find_codec(frame.codec).decode(step.body, frame.rows, frame.width)


def _sent(step: StepRows) -> Array | dict[tuple[int, int], int]:
    """What went out, as the next stage reads it, or the tokens picked by session and row."""
    out = step.out
    if isinstance(out, Chunk):
        return find_codec(out.codec).rows.unpack(out.rows, out.width)
    return {(each.session, each.position): each.choice.id for each in out if not each.is_scored}


def _picks(part: SessionRows, picked: dict[tuple[int, int], int]) -> list[bytes]:
    rows = range(part.start, part.start + len(part.ids))
    tokens = (picked.get((part.session, row)) for row in rows)
    return [NO_PICK if token is None else id_row(token) for token in tokens]


def _digests(rows: Array) -> list[bytes]:
    exact = np.ascontiguousarray(rows, dtype="<f4")
    return [hashlib.sha256(row.data).digest() for row in exact]
