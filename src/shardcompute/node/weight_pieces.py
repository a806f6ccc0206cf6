"""Pieces of tensors, fetched from several sources at once.

Each source has a link and, while a fetch runs, a thread that keeps a few requests under way on it; all take from
one queue, so a fast source does more of the work. A link that breaks is dialled again, after longer and longer
waits; its pieces go back to the queue at once, so that others need not wait for it. A source that refuses a
tensor is not asked for that tensor again. The fetch fails when somebody's piece can come from nobody any more.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardcompute.core.errors import LinkError, ShardComputeError, SourceError
from shardcompute.wire import Goodbye, Link
from shardcompute.wire.control import FetchFailed, FetchTensor, TensorBytes

PIECE_BYTES = 4 << 20
RETRY_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
_WINDOW = 4
_REPLY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Supplier:
    """Somebody to fetch from. An origin (the coordinator) is believed; of peers only whole tensors are taken, and
    only if their hash is what an origin says."""

    name: str
    dial: Callable[[], Link]
    is_origin: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[start, stop)` of a tensor; none at all to ask for its hash. Some may come from an origin only."""

    tensor: str
    start: int
    stop: int
    needs_origin: bool = False

    @property
    def kind(self) -> tuple[str, bool]:
        """Who refuses one piece of a kind refuses all of it: a tensor's bytes, or what only an origin may say."""
        return (self.tensor, self.needs_origin)


class SourceLine:
    """A source and the link to it, which stays open from one fetch to the next."""

    def __init__(self, source: Supplier, model: str, delays_s: Sequence[float] = RETRY_DELAYS_S) -> None:
        self.source = source
        self.is_dropped = False
        """Out of reach for good, or caught with wrong bytes."""
        self._model = model
        self._delays_s = delays_s
        self._failures = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._is_dialling = False
        self._is_closed = False

    @property
    def is_dialling(self) -> bool:
        """True while the source has not even answered: nobody should wait for that."""
        return self._is_dialling

    def drop(self) -> None:
        """Never ask this source again."""
        self.is_dropped = True
        self.hang_up()

    def hang_up(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def say_goodbye(self) -> None:
        with self._lock:
            self._is_closed = True
            link = self._link
        if link is not None:
            with contextlib.suppress(LinkError):
                link.send(Goodbye("all is fetched"))
        self.hang_up()

    def work(self, queue: PieceQueue, deliver: Deliver) -> None:
        """Fetch from the queue until it is over or this source has failed too often."""
        while not queue.is_over and not self.is_dropped:
            asked: dict[int, Piece] = {}
            try:
                self._exchange(queue, asked, deliver)
                return
            except (LinkError, TimeoutError) as error:
                self.hang_up()
                self._failures += 1
                has_given_up = self._failures > len(self._delays_s)
                self.is_dropped = self.is_dropped or has_given_up
                queue.give_back(asked.values(), None if not self.is_dropped else (self, error))
                if self.is_dropped or queue.wait_over(self._delays_s[self._failures - 1]):
                    return
            except Exception as error:
                queue.fail(error)
                self.hang_up()
                return

    def _exchange(self, queue: PieceQueue, asked: dict[int, Piece], deliver: Deliver) -> None:
        # Dial before a piece is taken: a source that does not answer must not hold one back.
        if not queue.await_piece(self):
            return
        link = self._opened()
        if queue.is_over:
            return
        while True:
            while len(asked) < _WINDOW and (piece := queue.take(self, is_patient=not asked)) is not None:
                number = next(self._numbers)
                asked[number] = piece
                length = piece.stop - piece.start
                link.send(FetchTensor(number, self._model, piece.tensor, piece.start, length))
            if not asked:
                return
            message, body = link.receive(_REPLY_TIMEOUT_S)
            if isinstance(message, FetchFailed) and message.number in asked:
                queue.refuse(self, asked.pop(message.number), message.reason)
            elif isinstance(message, TensorBytes) and message.number in asked:
                piece = asked[message.number]
                if len(body) != piece.stop - piece.start:
                    raise LinkError(f"{self.source.name} sent {len(body)} bytes where others were asked for")
                deliver(queue, self, piece, body, message.tensor_sha256)
                del asked[message.number]
                queue.finish(piece)
                self._failures = 0
            else:
                raise LinkError(f"{self.source.name} sent {type(message).__name__}, for which nobody asked")

    def _opened(self) -> Link:
        with self._lock:
            link = self._link
        if link is not None:
            return link
        self._is_dialling = True
        try:
            link = self.source.dial()
        finally:
            self._is_dialling = False
        with self._lock:
            is_wanted = not (self._is_closed or self.is_dropped)
            if is_wanted:
                self._link = link
        if not is_wanted:
            link.close()
            raise LinkError(f"nobody waits for {self.source.name} any more")
        return link


class PieceQueue:
    """The pieces of one fetch that nobody has asked for yet, and how many are under way."""

    def __init__(self, lines: Iterable[SourceLine], pieces: Iterable[Piece]) -> None:
        self._changed = threading.Condition()
        self._lines = {line for line in lines if not line.is_dropped}
        self._pending = deque(pieces)
        self._under_way = 0
        self._excluded: dict[tuple[str, bool], set[SourceLine]] = {}
        self._reason = "there is no source left"
        self._is_stopped = False
        self.error: Exception | None = None
        self._check_sources(self._pending)

    @property
    def is_over(self) -> bool:
        with self._changed:
            return self._is_over()

    def wait_over(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(self._is_over, timeout_s)

    def await_piece(self, line: SourceLine) -> bool:
        """True as soon as there is a piece for this source, False if it is over before that."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self._find(line) is not None)
            return not self._is_over()

    def take(self, line: SourceLine, *, is_patient: bool) -> Piece | None:
        """A piece for this source; None if there is none now or, to the patient, if it is all over."""
        with self._changed:
            if is_patient:
                self._changed.wait_for(lambda: self._is_over() or self._find(line) is not None)
            index = None if self._is_over() else self._find(line)
            if index is None:
                return None
            piece = self._pending[index]
            del self._pending[index]
            self._under_way += 1
            return piece

    def finish(self, piece: Piece) -> None:
        """A piece has arrived."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def add(self, pieces: Iterable[Piece]) -> None:
        """More to fetch; called while a piece is under way, so that it is not over yet."""
        with self._changed:
            added = list(pieces)
            self._pending.extendleft(reversed(added))
            self._check_sources(added)
            self._changed.notify_all()

    def give_back(self, pieces: Iterable[Piece], lost: tuple[SourceLine, Exception] | None) -> None:
        """These did not come, because their link broke; perhaps the source is lost for good."""
        with self._changed:
            given = list(pieces)
            self._under_way -= len(given)
            self._pending.extendleft(reversed(given))
            if lost is not None:
                self._lines.discard(lost[0])
                self._reason = str(lost[1]) or f"{lost[0].source.name} did not answer in time"
                self._check_sources(self._pending)
            self._changed.notify_all()

    def refuse(self, line: SourceLine, piece: Piece, reason: str) -> None:
        """The source does not have this tensor."""
        with self._changed:
            self._excluded.setdefault(piece.kind, set()).add(line)
            self._reason = f"{line.source.name}: {reason}"
            self._under_way -= 1
            self._pending.appendleft(piece)
            self._check_sources([piece])
            self._changed.notify_all()

    def exclude(self, lines: Iterable[SourceLine], tensor: str) -> bool:
        """Ask these sources for a tensor's bytes no more; False if nobody would be left to ask."""
        with self._changed:
            excluded = self._excluded.setdefault((tensor, False), set())
            excluded.update(lines)
            return bool(self._lines - excluded)

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def stop(self) -> None:
        """Leave the rest unfetched."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self.error is not None or self._is_stopped or not (self._pending or self._under_way)

    def _find(self, line: SourceLine) -> int | None:
        return next((i for i, piece in enumerate(self._pending) if self._may_give(line, piece)), None)

    def _may_give(self, line: SourceLine, piece: Piece) -> bool:
        if piece.needs_origin and not line.source.is_origin:
            return False
        return line not in self._excluded.get(piece.kind, ())

    def _check_sources(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if not any(self._may_give(line, piece) for line in self._lines):
                self.error = self.error or SourceError(
                    f"{piece.tensor!r} cannot be fetched from anyone: {self._reason}",
                    hint="check that the coordinator is running and can be reached",
                )
                return


Deliver = Callable[[PieceQueue, SourceLine, Piece, memoryview, bytes], None]
"""Takes in a piece, with the tensor's hash where the sender told it."""


def fetch_pieces(lines: Sequence[SourceLine], pieces: Iterable[Piece], deliver: Deliver) -> None:
    """Fetch all `pieces`, in about their order. `deliver` is called in the sources' threads, for several at once."""
    live = [line for line in lines if not line.is_dropped and not line.is_dialling]
    queue = PieceQueue(live, pieces)
    threads = {
        line: threading.Thread(
            target=line.work, args=(queue, deliver), name=f"fetch {line.source.name}", daemon=True
        )
        for line in live
    }
    for thread in threads.values():
        thread.start()
    queue.wait_over()
    for line, thread in threads.items():
        if queue.error is not None:
            line.hang_up()
        if not line.is_dialling:
            thread.join()
    if isinstance(queue.error, ShardComputeError):
        raise queue.error
    if queue.error is not None:
        raise SourceError(f"fetching weights failed: {queue.error!r}") from queue.error
