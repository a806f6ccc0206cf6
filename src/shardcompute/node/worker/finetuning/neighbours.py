"""The stages before and behind one that learns: activations and gradients, read and sent by threads of their own.

So computing goes on while rows are under way. A few of them wait to be sent; whoever has more waits with them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import LinkError
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.swarm.frames import RowFacts, make_frame, pack_rows, read_facts, unpack_rows
from shardcompute.finetune.swarm.validation import check_rows
from shardcompute.wire import Link, TrainingFrame

if TYPE_CHECKING:
    from shardcompute.finetune.swarm.stage_runner import Mailbox

_MOST_WAITING = 4
_PATIENCE_S = 300.0
_Rows = tuple[str, int, int, Float32]
"""Kind, call, number, values."""


class NeighbourLinks:
    """Of one stage of the run `run`. Rows that come go to `mailbox`; `hidden` is how wide they are."""

    def __init__(self, run: str, codec: str, mailbox: Mailbox, hidden: int, plan: FinetunePlan) -> None:
        self._run, self._codec, self._mailbox = run, codec, mailbox
        self._hidden, self._plan = hidden, plan
        self._lock = threading.Lock()
        self._outboxes: dict[str, _Outbox] = {}

    def attach(self, kind: str, link: Link) -> None:
        """Rows of this kind go over the link from now on."""
        outbox = _Outbox(link, self._write, self._mailbox.fail)
        with self._lock:
            former = self._outboxes.get(kind)
            self._outboxes[kind] = outbox
        if former is not None:
            former.close()

    def read(self, link: Link, kind: str) -> None:
        """Take rows of this kind until the link ends, which raises LinkError."""
        try:
            while True:
                message, body = link.receive()
                if not isinstance(message, TrainingFrame):
                    raise LinkError(f"{link.peer} sent {type(message).__name__} in a run")
                facts = read_facts(message, RowFacts)
                check_rows(facts, message.kind, kind, self._hidden, self._plan)
                self._mailbox.put(kind, message.call, message.number, unpack_rows(facts, body))
        except LinkError as error:
            self._mailbox.fail(f"the link with the stage of {link.peer} ended: {error.message}")
            raise

    def send(self, kind: str, call: int, number: int, values: Float32) -> None:
        with self._lock:
            outbox = self._outboxes.get(kind)
        if outbox is None:
            raise LinkError("a neighbour has not connected", hint="the run goes on from its last checkpoint")
        outbox.put((kind, call, number, values))

    def settle(self) -> int:
        """Wait until all rows have gone; how many bytes that were since the last time."""
        with self._lock:
            outboxes = list(self._outboxes.values())
        return sum(outbox.settle() for outbox in outboxes)

    def close(self) -> None:
        with self._lock:
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.close()

    def _write(self, link: Link, rows: _Rows) -> int:
        kind, call, number, values = rows
        facts, body = pack_rows(values, self._codec)
        frame, parts = make_frame(self._run, kind, facts, body, call=call, number=number)
        link.send(frame, parts)
        return frame.size


class _Outbox:
    """Rows on their way over one link, with the thread that sends them."""

    def __init__(
        self, link: Link, write: Callable[[Link, _Rows], int], on_error: Callable[[str], None]
    ) -> None:
        self._link, self._write, self._on_error = link, write, on_error
        self._waiting: queue.Queue[_Rows | None] = queue.Queue(_MOST_WAITING)
        self._sent_bytes = 0
        self._is_broken = threading.Event()
        threading.Thread(target=self._send_all, name="finetune rows", daemon=True).start()

    def put(self, rows: _Rows) -> None:
        try:
            self._waiting.put(rows, timeout=_PATIENCE_S)
        except queue.Full:
            self._is_broken.set()
        self._check()

    def settle(self) -> int:
        self._waiting.join()
        self._check()
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def close(self) -> None:
        self._is_broken.set()
        with contextlib.suppress(LinkError):
            self._link.close()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _send_all(self) -> None:
        while True:
            rows = self._waiting.get()
            try:
                # What a broken link cannot take is dropped, so that nobody waits for it.
                if rows is not None and not self._is_broken.is_set():
                    self._sent_bytes += self._write(self._link, rows)
            except LinkError as error:
                self._is_broken.set()
                self._on_error(f"the link with the stage of {self._link.peer} ended: {error.message}")
            finally:
                self._waiting.task_done()
            if rows is None or (self._is_broken.is_set() and self._waiting.empty()):
                return

    def _check(self) -> None:
        if self._is_broken.is_set():
            raise LinkError(
                f"the link with the stage of {self._link.peer} ended",
                hint="the run goes on from its last checkpoint",
            )
