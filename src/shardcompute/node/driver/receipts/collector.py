"""Collector of receipts: takes what stages sign for, and makes the receipt once the last of them has.

What a member says is checked as far as that bounds memory and keeps answers apart: it speaks for itself, about an
answer that is under way, in order. Whether signatures fit is for whoever verifies the receipt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from shardcompute.core.effects import CallLater, start_timer
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.driver.receipts.record import AnswerRecord, PutEffect
from shardcompute.node.driver.receipts.store import ReceiptStore, pack_text
from shardcompute.security.credentials import Credentials
from shardcompute.security.receipts.records import (
    MOST_RUNS,
    BlockCommitment,
    Receipt,
    ReceiptId,
    ReceiptRun,
    StageTranscript,
    sign_receipt,
    write_receipt,
)
from shardcompute.wire import StageSigned

log = logging.getLogger(__name__)
_PATIENCE_S = 20.0
"""So long stages may take to sign after an answer has ended: the chain may be repaired meanwhile."""
_MOST_ANSWERS = 4096
_MOST_ANSWER_BYTES = 16 << 20
_MOST_BYTES = 256 << 20
"""Of what stages signed for one answer, and for all that are under way."""
_transcripts = msgspec.msgpack.Decoder(StageTranscript)
_Key = tuple[str, int]
"""(chain, session)"""


@dataclass(slots=True)
class _Collected:
    record: AnswerRecord
    transcripts: dict[tuple[str, int, int], StageTranscript] = field(default_factory=dict)
    """By node, epoch and frame in which they were opened."""
    certificates: dict[str, str] = field(default_factory=dict)
    size_bytes: int = 0
    over: set[str] = field(default_factory=set)
    """Those who have signed for all that they will."""
    is_finished: bool = False

    @property
    def is_complete(self) -> bool:
        return self.is_finished and self.over.issuperset(self.record.runs[-1].nodes)


class ReceiptCollector:
    """Of all drivers of a pool. Methods may be called from any thread."""

    def __init__(
        self,
        credentials: Callable[[], Credentials],
        store: ReceiptStore,
        *,
        on_made: Callable[[str, bytes], None] = lambda receipt, packed: None,
        patience_s: float = _PATIENCE_S,
        call_later: CallLater = start_timer,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_made` hears of every receipt (b"": there is none), with what the store keeps of it."""
        self._credentials = credentials
        self._store = store
        self._on_made = on_made
        self._patience_s = patience_s
        self._call_later = call_later
        self._clock = clock
        self._lock = threading.Lock()
        self._collected: dict[_Key, _Collected] = {}
        self._used_bytes = 0

    def begin(self, session: int, request: GenerationRequest, answered: int) -> AnswerRecord | None:
        """The record of an answer that is to have a receipt; None: it is to have none."""
        if not request.receipt:
            return None
        return AnswerRecord(session, request, len(request.prompt) + answered)

    def expect(self, record: AnswerRecord) -> None:
        """Stages begin to sign for it."""
        with self._lock:
            key = (record.chain, record.session)
            if record.chain and key not in self._collected and len(self._collected) < _MOST_ANSWERS:
                self._collected[key] = _Collected(record)

    def take(self, message: StageSigned, sender: str) -> None:
        """What a stage signed for; anything else that it says is left out."""
        key = (message.chain, message.session)
        transcript = self._read(message, sender)
        with self._lock:
            known = self._collected.get(key)
            if known is None or sender not in known.record.nodes:
                return
            if transcript is not None and transcript.header.receipt == known.record.request.receipt:
                self._add(known, transcript, sender, message)
            if message.is_over:
                known.over.add(sender)
            is_complete = known.is_complete
        if is_complete:
            self._make(key)

    def finish(self, record: AnswerRecord) -> None:
        """The answer is over; its last rows are being signed for."""
        key = (record.chain, record.session)
        with self._lock:
            known = self._collected.get(key)
            if known is not None:
                known.is_finished = True
            is_complete = known is not None and known.is_complete
        if known is None:
            self._tell(record.request.receipt, b"")
        elif is_complete:
            self._make(key)
        else:
            self._call_later(self._patience_s, partial(self._make, key))

    def reconnect(self, port: object, put: PutEffect) -> None:
        """A chain has another shape: ask again for what was not signed for before."""
        with self._lock:
            for (chain, _), known in self._collected.items():
                if known.is_finished and chain == getattr(port, "chain", ""):
                    known.over.clear()
                    known.record.ask_again(port, put)

    def abandon(self, record: AnswerRecord) -> None:
        """There will be no whole answer, and no receipt."""
        with self._lock:
            known = self._collected.get((record.chain, record.session))
            if known is not None and known.record is record:
                self._drop((record.chain, record.session))
        self._tell(record.request.receipt, b"")

    def _read(self, message: StageSigned, sender: str) -> StageTranscript | None:
        if not message.signed:
            return None
        try:
            transcript = _transcripts.decode(message.signed)
        except (ValueError, RecursionError) as error:
            log.warning("%s signed for something that cannot be read: %s", sender, error)
            return None
        header = transcript.header
        is_own = header.claim.node == sender
        return (
            transcript
            if is_own and (header.chain, header.session) == (message.chain, message.session)
            else None
        )

    def _make(self, key: _Key) -> None:
        with self._lock:
            known = self._drop(key)
        if known is None:
            return
        receipt = known.record.request.receipt
        try:
            packed = pack_text(write_receipt(self._join(known))) if known.transcripts else b""
        except Exception:
            log.exception("the receipt %s could not be made", receipt)
            packed = b""
        self._tell(receipt, packed)

    def _drop(self, key: _Key) -> _Collected | None:
        known = self._collected.pop(key, None)
        self._used_bytes -= 0 if known is None else known.size_bytes
        return known

    def _add(self, known: _Collected, transcript: StageTranscript, sender: str, message: StageSigned) -> None:
        """Append to what this stage signed before, where it follows and there is room."""
        header, size_bytes = transcript.header, len(message.signed)
        key = (sender, header.opened_epoch, header.opened_frame)
        former = known.transcripts.get(key)
        if former is None and sum(1 for node, *_ in known.transcripts if node == sender) >= MOST_RUNS:
            return
        if former is not None and former.header != header:
            return
        kept: list[BlockCommitment] = [] if former is None else former.commitments
        # Where the chain changed its shape, stages tell all of it again.
        new = [each for each in transcript.commitments if each.number >= len(kept)]
        is_next = all(each.number == at for at, each in enumerate(new, len(kept)))
        has_room = (
            known.size_bytes + size_bytes <= _MOST_ANSWER_BYTES
            and self._used_bytes + size_bytes <= _MOST_BYTES
        )
        if not (is_next and has_room):
            return
        if new:
            known.size_bytes += size_bytes
            self._used_bytes += size_bytes
        kept.extend(new)
        known.transcripts[key] = StageTranscript(header=header, commitments=kept)
        known.certificates[sender] = message.certificate

    def _tell(self, receipt: str, packed: bytes) -> None:
        self._store.put(receipt, packed)
        self._on_made(receipt, packed)

    def _join(self, known: _Collected) -> Receipt:
        own, record = self._credentials(), known.record
        driver = own.identity.node_id
        transcripts = sorted(
            known.transcripts.values(),
            key=lambda each: (each.header.opened_epoch, each.header.claim.start, each.header.opened_frame),
        )
        named = {node for run in record.runs for node in run.nodes}
        certificates = {node: pem for node, pem in known.certificates.items() if node in named}
        receipt = Receipt(
            id=record.request.receipt,
            cluster=own.own.cluster,
            issued_s=int(self._clock()),
            model=transcripts[0].header.claim.model,
            adapter=record.request.adapter,
            tokens=record.tokens,
            prompt_tokens=len(record.request.prompt),
            given_tokens=record.given_tokens,
            reused_rows=reused_rows(record.runs),
            runs=record.runs,
            transcripts=[each for each in transcripts if each.header.claim.node in named],
            certificates={**certificates, driver: own.certificate_pem},
            authority=own.authority_pem,
            driver=driver,
        )
        return sign_receipt(receipt, own.identity.sign)


def check_receipt(request: GenerationRequest, collector: ReceiptCollector | None) -> None:
    """UsageError for a receipt that cannot be made."""
    if not request.receipt:
        return
    if collector is None:
        raise UsageError(
            "this process computes alone: there is no node whose key could sign a receipt",
            hint="start a cluster with `shardcompute up` and ask that",
        )
    try:
        msgspec.convert(request.receipt, ReceiptId)
    except msgspec.ValidationError as error:
        raise UsageError(f"{request.receipt[:60]!r} is no id of a receipt") from error


def reused_rows(runs: Sequence[ReceiptRun]) -> int:
    """Where the rows begin that the last run goes on from."""
    needed = runs[-1].start
    for run in reversed(runs):
        if run.start < needed <= run.stop:
            needed = run.start
    return needed
