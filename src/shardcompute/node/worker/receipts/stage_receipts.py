"""Receipts at a stage: signing, off the thread that computes.

The computing thread hands over what it has anyway, the body of a frame and the rows that were sent on; a thread of its
own hashes and signs, and tells the session's driver. It is woken for several steps at once: one at a time would cost
more in waking it, and in code that has left the processor's caches meanwhile, than in hashing. Sessions that want no
receipt cost one look at a set. Where the thread falls behind by more than it may hold, it gives up the receipts of
those sessions: no step ever waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardcompute.core.errors import LinkError
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.worker.receipts.signer import StepRows, StepSigner, TapeKey
from shardcompute.security.credentials import Credentials
from shardcompute.wire import Message, SessionCommit

log = logging.getLogger(__name__)
STEPS_AT_ONCE = 16
"""So many steps are handed over together, fewer where they are large or a session is signed for."""
_BYTES_AT_ONCE = 1 << 20
_MOST_WAITING_BYTES = 256 << 20
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _SessionCut:
    message: SessionCommit
    driver: Peer


_Item: TypeAlias = list[StepRows] | _SessionCut | tuple[TapeKey, ...]
"""Steps, what to sign for, or sessions to forget."""


class StageReceipts:
    """Of all stages of a worker. All methods are for the computing thread."""

    def __init__(
        self, credentials: Callable[[], Credentials] | None, send: Callable[[Peer, Message], None]
    ) -> None:
        """Without `credentials` nothing is signed for."""
        self._signer = None if credentials is None else StepSigner(credentials, send)
        self._wanted: set[TapeKey] = set()
        self._gathered: list[StepRows] = []
        self._gathered_bytes = 0
        self._inbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None

    def concerns(self, chain: str, work: Sequence[SessionRows], openings: Sequence[Opening]) -> bool:
        """Whether a step has rows of answers that are to have a receipt."""
        if self._signer is None:
            return False
        for opening in openings:
            if opening.receipt_nonce:
                self._wanted.add((chain, opening.session))
        return bool(self._wanted) and any((chain, part.session) in self._wanted for part in work)

    def computed(self, rows: StepRows) -> None:
        """Such a step is done; what it was computed from and what came of it stays as it is."""
        self._gathered.append(rows)
        self._gathered_bytes += rows.size_bytes
        if len(self._gathered) >= STEPS_AT_ONCE or self._gathered_bytes >= _BYTES_AT_ONCE:
            self._hand_over()

    def commit(self, message: SessionCommit, driver: Peer) -> None:
        """Sign for what is kept of a session, and tell the driver."""
        if message.is_over:
            self._wanted.discard((message.chain, message.session))
        self._put(_SessionCut(message, driver))

    def forget(self, chain: str, sessions: Sequence[int]) -> None:
        """These sessions are over."""
        known = [key for key in ((chain, session) for session in sessions) if key in self._wanted]
        if known:
            self._wanted.difference_update(known)
            self._put(tuple(known))

    def close(self) -> None:
        self._hand_over()
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(_CLOSE_S)

    def _put(self, item: _SessionCut | tuple[TapeKey, ...]) -> None:
        """Behind all steps before it."""
        self._hand_over()
        self._send_in(item)

    def _hand_over(self) -> None:
        steps, size, self._gathered, self._gathered_bytes = self._gathered, self._gathered_bytes, [], 0
        if not steps:
            return
        with self._lock:
            has_room = self._waiting_bytes + size <= _MOST_WAITING_BYTES
            self._waiting_bytes += size if has_room else 0
        if has_room:
            self._send_in(steps)
            return
        keys = {(step.frame.chain, part.session) for step in steps for part in step.work} & self._wanted
        log.warning("receipts fall behind: those of %d sessions are given up", len(keys))
        self._wanted -= keys
        self._send_in(tuple(keys))

    def _send_in(self, item: _Item) -> None:
        if self._signer is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, args=(self._signer,), name="receipts", daemon=True
            )
            self._thread.start()
        self._inbox.put(item)

    def _serve(self, signer: StepSigner) -> None:
        while (item := self._inbox.get()) is not None:
            for part in item if isinstance(item, list) else (item,):
                try:
                    self._sign(signer, part)
                except LinkError as error:
                    log.info("a driver was not told what was signed: %s", error)
                except Exception:
                    # Answers go on without their receipts.
                    log.exception("a step could not be signed for")

    def _sign(self, signer: StepSigner, item: StepRows | _SessionCut | tuple[TapeKey, ...]) -> None:
        if isinstance(item, _SessionCut):
            signer.cut(item.message, item.driver)
        elif isinstance(item, tuple):
            for key in item:
                signer.forget(key)
        else:
            try:
                signer.write(item)
            finally:
                with self._lock:
                    self._waiting_bytes -= item.size_bytes
