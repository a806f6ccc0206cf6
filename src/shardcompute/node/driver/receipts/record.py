"""Record of an answer: which shapes of the chain computed which of its rows, and when stages are to sign for them.

Belongs to the driver, under its lock; what it sends is put among the driver's effects, in order with frames. A *run* is
cut where the chain has another shape, where a session gives up its memory, and at the end of the answer: stages sign
for what is kept, so that rejected drafts and rows that were on their way are signed for by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from shardcompute.core.effects import Effect
from shardcompute.core.generation import GenerationRequest
from shardcompute.core.steps import Opening
from shardcompute.security.receipts.records import ReceiptRun

PutEffect = Callable[[Effect], None]


@runtime_checkable
class SigningPort(Protocol):
    """A chain whose stages sign: one epoch of it."""

    @property
    def chain(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def nodes(self) -> Sequence[str]:
        """Its stages', in order."""
        ...

    def commit_session(self, session: int, length: int, *, is_over: bool) -> None:
        """Have every stage sign for the first `length` rows, after the frames sent so far."""
        ...


@dataclass(frozen=True, slots=True)
class _OpenRun:
    port: SigningPort
    opened_frame: int
    start: int
    picked_from: int

    def closed(self, session: int, stop: int) -> ReceiptRun:
        return ReceiptRun(
            session=session,
            epoch=self.port.epoch,
            opened_frame=self.opened_frame,
            start=self.start,
            stop=stop,
            picked_from=self.picked_from,
            nodes=list(self.port.nodes),
        )


class AnswerRecord:
    """Rows are counted as the session's known tokens less the last, whose row is yet to be computed."""

    def __init__(self, session: int, request: GenerationRequest, given_tokens: int) -> None:
        self.session = session
        self.request = request
        self.given_tokens = given_tokens
        self.chain = ""
        self.nodes: set[str] = set()
        """All that had a part in it, to whom the collector listens."""
        self.runs: list[ReceiptRun] = []
        self.tokens: list[int] = []
        """Of prompt and answer, once it is over."""
        self._run: _OpenRun | None = None

    def opened(self, port: object, frame: int, opening: Opening, rows: int) -> None:
        """A frame tells the chain of the session, from its start on."""
        if not isinstance(port, SigningPort):
            return
        self._close(rows)
        self.chain = port.chain
        self.nodes.update(port.nodes)
        self._run = _OpenRun(port, frame, 0 if opening.prefix is None else opening.prefix.length, rows)

    def cut(self, port: object, rows: int, put: PutEffect) -> None:
        """What was computed so far is signed for by whoever is left of those who did."""
        if self._run is not None and isinstance(port, SigningPort):
            put(partial(port.commit_session, self.session, rows, is_over=False))

    def restarted(self, rows: int) -> None:
        """What the chain knew is gone."""
        self._close(rows)

    def resumed(self, port: object, rows: int) -> None:
        """The chain has another shape and goes on behind the rows that it knows."""
        run = self._run
        if run is None or not isinstance(port, SigningPort):
            return
        self._run = None
        if rows > run.start:
            self.runs.append(run.closed(self.session, rows))
        self.nodes.update(port.nodes)
        self._run = _OpenRun(port, run.opened_frame, rows, rows)

    def finish(self, tokens: Sequence[int], put: PutEffect) -> bool:
        """The answer is over. False: nobody will sign for its end."""
        run, rows = self._run, len(tokens) - 1
        self.tokens = list(tokens)
        if run is None:
            return False
        self._close(rows)
        put(partial(run.port.commit_session, self.session, rows, is_over=True))
        return bool(self.runs)

    def ask_again(self, port: object, put: PutEffect) -> None:
        """The chain changed its shape before all had signed for the end: those who are left are asked again. That it
        did is told by a run without rows."""
        if not isinstance(port, SigningPort):
            return
        rows = len(self.tokens) - 1
        self.nodes.update(port.nodes)
        self.runs.append(_OpenRun(port, self.runs[-1].opened_frame, rows, rows).closed(self.session, rows))
        put(partial(port.commit_session, self.session, rows, is_over=True))

    def _close(self, rows: int) -> None:
        """The open run has ended. One in which nothing was picked, and from which nobody goes on, is not told of."""
        run, self._run = self._run, None
        if run is not None and rows > max(run.picked_from, run.start):
            self.runs.append(run.closed(self.session, rows))
