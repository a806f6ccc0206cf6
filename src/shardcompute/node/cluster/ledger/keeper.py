"""Keeper of the ledger: hears what happens, has it written in batches, and shows members that it only grows.

One thread writes. Members and layouts are on record some seconds after they change; receipts and meters once in some
minutes, as one entry each, so that a busy cluster does not grow a large file. A disk that is full, or a file that is
damaged, stops the ledger and not the cluster: `problem` says so.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from shardcompute.control.state import ClusterState
from shardcompute.core.errors import SourceError, UsageError
from shardcompute.core.fields import shorten
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.cluster.audits.auditor import AuditRecord
from shardcompute.node.cluster.ledger.batch import KnownReceipt, KnownReceipts, ReceiptBatch
from shardcompute.node.cluster.ledger.crediting import contradicted, is_answer_of, work_of
from shardcompute.node.cluster.ledger.file import LedgerFile
from shardcompute.node.cluster.ledger.meters import Meters, ReadMeters
from shardcompute.node.cluster.ledger.observing import Observed
from shardcompute.node.cluster.ledger.views import LedgerView
from shardcompute.node.driver.receipts.store import unpack_text
from shardcompute.security.receipts import ReceiptError, read_receipt, verify_receipt
from shardcompute.trust.ledger import Entry, LedgerError, TokenWork, hash_leaf
from shardcompute.trust.ledger.proofs import ReceiptProof, write_proof
from shardcompute.trust.ledger.records import (
    AuditTaken,
    LogClosed,
    LogOpened,
    MeterRead,
    ReceiptsTaken,
    write_line,
)
from shardcompute.version import VERSION
from shardcompute.wire.control import LedgerDoubted, LedgerShown, LookAtLedger

log = logging.getLogger(__name__)
_SETTLE_S = 5.0
_BATCH_S = 300.0
_ASKED_S = 60.0
_METER_S = 3600.0
_FLUSH_S = 10.0
_CLOSE_S = 10.0
_LOOK_S = 2.0
_MOST_ASKED = 4096
_MOST_WAITING = 1024
_MOST_PENDING = 4096
_MOST_DOUBTS = 256
_MOST_RECEIPTS = 1 << 16


@dataclass(frozen=True, slots=True)
class LedgerTerms:
    """How long things may wait until they are on record."""

    settle_s: float = _SETTLE_S
    batch_s: float = _BATCH_S
    """Receipts and meters."""
    asked_s: float = _ASKED_S
    """Between two times that all of it is written because somebody looks."""


@dataclass(frozen=True, slots=True)
class _Flush:
    done: threading.Event


@dataclass(frozen=True, slots=True)
class _Made:
    receipt: str
    packed: bytes


_Item = _Made | AuditRecord | _Flush | None


class LedgerKeeper:
    """`file` None: there is none, because of `problem`. Methods may be called from any thread."""

    def __init__(
        self,
        file: LedgerFile | None,
        authority_pem: str,
        revoked: Callable[[], Collection[str]],
        read_meters: ReadMeters,
        *,
        draw: str = "",
        problem: str = "",
        terms: LedgerTerms | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`draw` is the digest of the secret by which audits are drawn."""
        self._file = file
        self._authority_pem = authority_pem
        self._revoked = revoked
        self._terms = terms or LedgerTerms()
        self._clock = clock
        self._opened = LogOpened(number=0, at_s=0, release=VERSION, draw=draw)
        self._lock = threading.Lock()
        self._problem = problem
        self._flushed_s = self._clock() - self._terms.asked_s
        self._doubts: dict[str, str] = {}
        self._observed = Observed()
        self._pending: list[Entry] = [self._opened]
        self._pending_since_s = self._clock() - self._terms.settle_s
        self._asked: OrderedDict[str, GenerationRequest] = OrderedDict()
        self._inbox: queue.Queue[_Item] = queue.Queue(_MOST_WAITING)
        # Of the thread that writes.
        self._batch = ReceiptBatch()
        self._batch_since_s = 0.0
        self._known = KnownReceipts()
        self._meters = Meters(read_meters)
        self._metered_s = self._clock()
        self._read_meters_at_s = self._clock() + self._terms.batch_s
        self._is_over = False
        self._retry_at_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="ledger", daemon=True)
        if file is not None:
            self._thread.start()

    # What it hears

    def saw(self, state: ClusterState) -> None:
        """The cluster's newest state, in the coordinator's thread."""
        if self._file is None:
            return
        with self._lock:
            self._add(self._observed.look(state, self._revoked()))
            if len(self._pending) > _MOST_PENDING:
                # What could not be written for so long is told as it is by now.
                self._observed = Observed()
                self._pending = [self._opened, *self._observed.look(state, self._revoked())]

    def asked(self, request: GenerationRequest) -> None:
        """An answer with a receipt is under way."""
        with self._lock:
            self._asked[request.receipt] = request
            while len(self._asked) > _MOST_ASKED:
                self._asked.popitem(last=False)

    def made(self, receipt: str, packed: bytes) -> None:
        """Its receipt, as the store keeps it; empty: there is none."""
        if packed and self._file is not None:
            self._put(_Made(receipt, packed))

    def audited(self, record: AuditRecord) -> None:
        if self._file is not None:
            self._put(record)

    def doubted(self, node: str, message: LedgerDoubted) -> None:
        """A member says that the ledger does not go on from what it saw before, or does again."""
        with self._lock:
            if not message.reason:
                self._doubts.pop(node, None)
            elif node in self._doubts or len(self._doubts) < _MOST_DOUBTS:
                self._doubts[node] = shorten(message.reason)

    # What it shows

    def show(self, node: str, message: LookAtLedger) -> LedgerShown | None:
        """The last head for a member that has seen an earlier one; None: there is none."""
        if self._file is None:
            return None
        self._meters.heard(node, message.seeded_bytes)
        head, proof = self._file.prove_since(message.size)
        return None if head is None else LedgerShown(write_line(head), proof)

    @property
    def problem(self) -> str:
        """Why nothing is added at present; "": all is well."""
        with self._lock:
            return self._problem

    @property
    def warnings(self) -> tuple[str, ...]:
        """For people; empty when all is well."""
        with self._lock:
            found = [f"nothing is added to the ledger: {self._problem}"] if self._problem else []
            found += [f"{node} doubts the ledger: {reason}" for node, reason in sorted(self._doubts.items())]
        return tuple(found)

    def newest_view(self) -> LedgerView:
        """With what was heard until now, where nobody has asked for that a moment ago."""
        with self._lock:
            now_s = self._clock()
            is_due = now_s - self._flushed_s >= self._terms.asked_s
            self._flushed_s = now_s if is_due else self._flushed_s
        if is_due:
            self.flush(_LOOK_S)
        return self.view()

    def view(self) -> LedgerView:
        with self._lock:
            problem, doubts = self._problem, dict(self._doubts)
        head = None if self._file is None else self._file.head
        if self._file is None or head is None:
            return LedgerView(problem=problem, doubts=doubts)
        accounts, length_bytes = self._file.accounts, self._file.length_bytes
        return LedgerView(
            cluster=head.cluster,
            log=head.log,
            size=head.size,
            root=head.root,
            signed_s=head.signed_s,
            receipts=accounts.receipts,
            size_bytes=length_bytes,
            machines=self._file.contributions(),
            problem=problem,
            doubts=doubts,
        )

    def export(self) -> bytes:
        """The whole ledger as a file. SourceError where there is none."""
        if self._file is None or self._file.head is None:
            raise SourceError(f"there is no ledger to export: {self.problem or 'nothing was written yet'}")
        return self._file.content()

    def prove_receipt(self, receipt: str) -> bytes:
        """That a receipt is in the ledger, as a file for who has no copy. UsageError where that is not known."""
        with self._lock:
            known = self._known.find(receipt)
        number = None if known is None else known.batch.number
        if self._file is None or known is None or number is None:
            raise UsageError(
                f"the ledger knows no receipt {receipt[:60]!r}",
                hint="of a new one ask again in five minutes; those of the latest 4096 answers are known",
            )
        head, line, path = self._file.prove_entry(number)
        proof = ReceiptProof(
            header=self._file.header,
            head=head,
            entry=line.decode(),
            entry_path=tuple(each.hex() for each in path),
            index=known.index,
            path=tuple(each.hex() for each in known.batch.tree.prove_inclusion(known.index)),
        )
        return write_proof(proof)

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Have all that was heard so far written; whether that was done in time."""
        flush = _Flush(threading.Event())
        return self._thread.is_alive() and self._put(flush) and flush.done.wait(timeout_s)

    def close(self) -> None:
        if self._file is None:
            return
        with self._lock:
            self._pending.append(LogClosed(number=0, at_s=0))
        self._put(None)
        self._thread.join(_CLOSE_S)
        self._file.close()

    def _put(self, item: _Item) -> bool:
        try:
            self._inbox.put(item, timeout=self._terms.settle_s if isinstance(item, AuditRecord) else 0.1)
            return True
        except queue.Full:
            log.warning("the ledger falls behind: something is not counted")
            return False

    def _add(self, entries: Collection[Entry]) -> None:
        """With the lock held."""
        if entries and not self._pending:
            self._pending_since_s = self._clock()
        self._pending += entries

    # In the ledger's thread

    def _serve(self) -> None:
        while not self._is_over:
            try:
                self._handle(self._inbox.get(timeout=self._terms.settle_s / 4))
            except queue.Empty:
                self._write(is_forced=False)
            except Exception:
                log.exception("something could not be taken into the ledger")

    def _handle(self, item: _Item) -> None:
        if isinstance(item, _Made):
            self._take_receipt(item)
        elif isinstance(item, AuditRecord):
            self._take_audit(item)
        self._is_over = item is None
        try:
            self._write(is_forced=item is None or isinstance(item, _Flush))
        finally:
            if isinstance(item, _Flush):
                item.done.set()

    def _take_receipt(self, made: _Made) -> None:
        with self._lock:
            request = self._asked.pop(made.receipt, None)
        text = unpack_text(made.packed)
        if request is None or text is None:
            return
        receipt = read_receipt(text)
        if not is_answer_of(receipt, request):
            log.warning("the receipt %s is of another answer than was asked for", made.receipt)
            return
        uncredited: dict[str, TokenWork] = {}
        try:
            credited = work_of(receipt, verify_receipt(receipt, self._authority_pem))
        except ReceiptError as error:
            log.info("the receipt %s credits nothing: %s", made.receipt, error.message)
            # What nobody has proved is told of machines that there are.
            claimed, members = work_of(receipt), self._members()
            credited, uncredited = {}, {node: work for node, work in claimed.items() if node in members}
        for node in self._known.early(made.receipt):
            if node in credited:
                uncredited[node] = credited.pop(node)
        if not self._batch.tree.size:
            self._batch_since_s = self._clock()
        index = self._batch.add(hash_leaf(text), credited, uncredited)
        with self._lock:
            self._known.put(made.receipt, KnownReceipt(self._batch, index, dict(credited)))

    def _members(self) -> Collection[str]:
        own = "" if self._file is None else self._file.header.log
        with self._lock:
            return {*self._observed.standings, own}

    def _take_audit(self, record: AuditRecord) -> None:
        blamed = contradicted(record.node, record.auditors, record.judgement)
        entry = AuditTaken(
            number=0,
            at_s=0,
            receipt=record.receipt,
            node=record.node,
            start=record.start,
            stop=record.stop,
            auditors=record.auditors,
            outcome=record.judgement.outcome,
            findings={each.node: each.finding for each in record.judgement.blames},
            withdrawn=self._known.contradict(record.receipt, blamed),
        )
        with self._lock:
            self._add([entry])

    def _write(self, *, is_forced: bool) -> None:
        """Write what is due, or all there is."""
        now_s = self._clock()
        if self._file is None or (now_s < self._retry_at_s and not is_forced):
            return
        pending, batch = self._due_entries(now_s, is_forced), self._due_batch(now_s, is_forced)
        meter = self._due_meter(now_s, is_forced)
        news: list[Entry | None] = [None if batch is None else batch.entry(), meter]
        entries = [*pending, *(each for each in news if each is not None)]
        # The end comes last.
        entries.sort(key=lambda each: isinstance(each, LogClosed))
        if not entries:
            return
        try:
            head = self._file.append(entries)
        except LedgerError:
            # It could never be written, whatever is tried: the rest is to go on, from what there is by now.
            self._batch = ReceiptBatch()
            with self._lock:
                self._observed, self._pending = Observed(), [self._opened]
            raise
        except SourceError as error:
            self._failed(error, pending)
            return
        if batch is not None:
            place = next(at for at, each in enumerate(entries) if isinstance(each, ReceiptsTaken))
            batch.number = head.size - len(entries) + place
            self._batch = ReceiptBatch()
        if meter is not None:
            self._meters.settle()
            self._metered_s = now_s
        with self._lock:
            self._problem = ""

    def _due_entries(self, now_s: float, is_forced: bool) -> list[Entry]:
        with self._lock:
            if not is_forced and now_s - self._pending_since_s < self._terms.settle_s:
                return []
            pending, self._pending = self._pending, []
            return pending

    def _due_batch(self, now_s: float, is_forced: bool) -> ReceiptBatch | None:
        size, waited_s = self._batch.tree.size, now_s - self._batch_since_s
        is_due = is_forced or waited_s >= self._terms.batch_s or size >= _MOST_RECEIPTS
        return self._batch if size and is_due else None

    def _due_meter(self, now_s: float, is_forced: bool) -> MeterRead | None:
        # What is read belongs to parts that may be closed by then.
        if self._is_over or (not is_forced and now_s < self._read_meters_at_s):
            return None
        self._read_meters_at_s = now_s + self._terms.batch_s
        meter = self._meters.read(self._members())
        if meter is None and now_s - self._metered_s >= _METER_S:
            # Uptime is counted until the last entry: a crash may cost an hour of it, and no more.
            return MeterRead(number=0, at_s=0, stored_bytes=self._meters.stored(self._members()))
        return meter

    def _failed(self, error: SourceError, pending: list[Entry]) -> None:
        self._retry_at_s = self._clock() + self._terms.settle_s
        with self._lock:
            self._pending = [*pending, *self._pending]
            is_new = not self._problem
            self._problem = error.message
        if is_new:
            log.error("%s; this is tried again", error)
