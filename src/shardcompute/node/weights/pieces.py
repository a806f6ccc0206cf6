"""Pieces of tensors, fetched from several sources at once.

Each source has a link and, while a fetch runs, a thread that keeps a few requests under way on it; all take from
one queue, so a fast source does more of the work. A link that breaks is dialled again, after longer and longer
waits; its pieces go back to the queue at once, so that others need not wait for it. A source that refuses a
tensor is not asked for that tensor again. One that has nothing left to do is asked for what another has not sent in
time, and whoever is first counts: a machine that hangs holds nobody up. The fetch fails when somebody's piece can
come from nobody any more.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardcompute.core.errors import LinkError, ShardComputeError, SourceError
from shardcompute.weights.sources.rate import RateLimit
from shardcompute.wire import Goodbye, Link
from shardcompute.wire.control import FetchFailed, FetchTensor, TensorBytes

PIECE_BYTES = 4 << 20
RETRY_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
_WINDOW = 4
_HASH_WINDOW = 64
_REPLY_TIMEOUT_S = 120.0
OVERDUE_S = 5.0
"""After so long an idle source is asked for a piece that another was asked for."""


@dataclass(frozen=True, slots=True)
class Supplier:
    """Somebody to fetch from. An origin (the coordinator) is believed; of peers only that is taken whose hash is what
    an origin says."""

    name: str
    dial: Callable[[], Link]
    is_origin: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[start, stop)` of a tensor, or no more than their hash. Some may come from an origin only."""

    tensor: str
    start: int
    stop: int
    needs_origin: bool = False
    is_hash: bool = False
    claim: bytes = b""
    """The hash that was found, where it is asked whether that is right."""

    @property
    def size_bytes(self) -> int:
        return 0 if self.is_hash else self.stop - self.start

    @property
    def kind(self) -> tuple[str, bool]:
        """Who refuses one piece of a kind refuses all of it: a tensor's bytes, or what only an origin may say."""
        return (self.tensor, self.needs_origin)


class PieceSource(Protocol):
    """A way to one source, which stays open from one fetch to the next. Threads of a fetch call `work`."""

    name: str
    is_dropped: bool
    """Out of reach for good, or caught with wrong bytes."""

    @property
    def is_origin(self) -> bool:
        """Whether it is believed, also about hashes."""

    @property
    def is_source(self) -> bool:
        """Whether the model's own source is read there: what it gives may be taken in parts, and is checked later."""

    @property
    def is_dialling(self) -> bool:
        """True while nobody should wait for it."""

    def has(self, tensor: str) -> bool:
        """Whether it may have the bytes of a tensor."""

    def drop(self) -> None:
        """Never ask this source again."""

    def hang_up(self) -> None: ...

    def say_goodbye(self) -> None: ...

    def work(self, queue: PieceQueue, deliver: Deliver) -> None:
        """Fetch from the queue until it is over or this source has failed too often."""


class SourceLine:
    """A node and the link to it."""

    is_source = False

    def __init__(
        self,
        source: Supplier,
        model: str,
        delays_s: Sequence[float] = RETRY_DELAYS_S,
        rate: RateLimit | None = None,
    ) -> None:
        self._rate = rate
        self.name = source.name
        self.is_origin = source.is_origin
        self.source = source
        self.is_dropped = False
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
        """True while the source has not even answered."""
        return self._is_dialling

    def has(self, tensor: str) -> bool:
        return True

    def drop(self) -> None:
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
                queue.give_back(self, asked.values(), error if self.is_dropped else None)
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
            while self._has_room(asked) and (piece := queue.take(self, is_patient=not asked)) is not None:
                number = next(self._numbers)
                asked[number] = piece
                hashed = piece.stop - piece.start if piece.is_hash else 0
                request = (piece.tensor, piece.start, piece.size_bytes, piece.claim, hashed)
                link.send(FetchTensor(number, self._model, *request))
            if not asked:
                return
            message, body = link.receive(_REPLY_TIMEOUT_S)
            if isinstance(message, FetchFailed) and message.number in asked:
                queue.refuse(self, asked.pop(message.number), message.reason)
            elif isinstance(message, TensorBytes) and message.number in asked:
                piece = asked[message.number]
                if len(body) != piece.size_bytes:
                    raise LinkError(f"{self.name} sent {len(body)} bytes where others were asked for")
                del asked[message.number]
                self._failures = 0
                if queue.claim(self, piece):
                    deliver(queue, self, piece, body, message.sha256)
                    queue.finish()
                wait_s = 0.0 if self._rate is None else self._rate.spend(len(body))
                if wait_s > 0 and queue.wait_over(wait_s):
                    return
            else:
                raise LinkError(f"{self.name} sent {type(message).__name__}, for which nobody asked")

    @staticmethod
    def _has_room(asked: Mapping[int, Piece]) -> bool:
        """Bytes fill a link with a few requests under way; hashes, which are short, with many."""
        return len(asked) < _HASH_WINDOW and sum(not piece.is_hash for piece in asked.values()) < _WINDOW

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
            raise LinkError(f"nobody waits for {self.name} any more")
        return link


@dataclass(slots=True)
class _Errand:
    """Who was asked for a piece, and when the last of them was."""

    lines: set[PieceSource]
    asked_s: float = field(default_factory=time.monotonic)


class PieceQueue:
    """The pieces of one fetch that nobody has asked for yet, and those that are under way."""

    def __init__(self, lines: Iterable[PieceSource], pieces: Iterable[Piece]) -> None:
        self._changed = threading.Condition()
        self._lines = {line for line in lines if not line.is_dropped}
        self._pending = deque(pieces)
        self._errands: dict[Piece, _Errand] = {}
        self._owing: set[tuple[PieceSource, Piece]] = set()
        self._delivering = 0
        self._excluded: dict[tuple[str, bool], set[PieceSource]] = {}
        self._reasons: dict[PieceSource, str] = {}
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

    def await_piece(self, line: PieceSource) -> bool:
        """True as soon as there is a piece for this source, False if it is over before that."""
        with self._changed:
            return self._await(line) is not None

    def take(
        self, line: PieceSource, *, is_patient: bool, is_wanted: Callable[[Piece], bool] = lambda piece: True
    ) -> Piece | None:
        """A piece for this source; None if there is none now, if the next is not wanted or, to the patient, if it is
        all over."""
        with self._changed:
            piece = self._await(line) if is_patient else self._find(line)
            if piece is None or self._is_over() or not is_wanted(piece):
                return None
            if piece in self._errands:
                others = self._errands[piece].lines
                self._errands[piece] = _Errand({line, *others})
            else:
                self._pending.remove(piece)
                self._errands[piece] = _Errand({line})
            return piece

    def claim(self, line: PieceSource, piece: Piece) -> bool:
        """A piece has come; whether it is the first time. To be followed by `finish` once it is taken in."""
        with self._changed:
            errand = self._errands.get(piece)
            if errand is None or line not in errand.lines:
                self._owing.discard((line, piece))
                return False
            del self._errands[piece]
            self._owing.update((other, piece) for other in errand.lines - {line})
            self._delivering += 1
            return True

    def finish(self) -> None:
        with self._changed:
            self._delivering -= 1
            self._changed.notify_all()

    def laggards(self) -> set[PieceSource]:
        """Who has still not sent what others have sent since."""
        with self._changed:
            return {line for line, _ in self._owing}

    def add(self, pieces: Iterable[Piece]) -> None:
        """More to fetch; called while a piece is under way, so that it is not over yet."""
        with self._changed:
            added = list(pieces)
            self._pending.extendleft(reversed(added))
            self._check_sources(added)
            self._changed.notify_all()

    def give_back(self, line: PieceSource, pieces: Iterable[Piece], lost: Exception | None) -> None:
        """These did not come, because the link broke; with `lost` the source is so for good."""
        with self._changed:
            for piece in reversed(list(pieces)):
                self._release(line, piece)
            if lost is not None:
                self._lines.discard(line)
                self._reasons[line] = str(lost) or f"{line.name} did not answer in time"
                self._check_sources((*self._pending, *self._errands))
            self._changed.notify_all()

    def refuse(self, line: PieceSource, piece: Piece, reason: str) -> None:
        """The source does not have this tensor."""
        with self._changed:
            self._excluded.setdefault(piece.kind, set()).add(line)
            self._reasons[line] = f"{line.name}: {reason}"
            if self._release(line, piece):
                self._check_sources([piece])
            self._changed.notify_all()

    def exclude(self, lines: Iterable[PieceSource], tensor: str) -> bool:
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
        is_done = not (self._pending or self._errands or self._delivering)
        return self.error is not None or self._is_stopped or is_done

    def _await(self, line: PieceSource) -> Piece | None:
        """The next piece for this source, as soon as there is one; None if it is over before that."""
        while not self._is_over():
            piece = self._find(line)
            if piece is not None:
                return piece
            self._changed.wait(OVERDUE_S / 4)
        return None

    def _find(self, line: PieceSource) -> Piece | None:
        """One that nobody was asked for, else one that is overdue."""
        pending = next((piece for piece in self._pending if self._may_take(line, piece)), None)
        if pending is not None:
            return pending
        latest_s = time.monotonic() - OVERDUE_S
        return next(
            (
                piece
                for piece, errand in self._errands.items()
                if errand.asked_s <= latest_s and line not in errand.lines and self._may_take(line, piece)
            ),
            None,
        )

    def _release(self, line: PieceSource, piece: Piece) -> bool:
        """The source will not send this piece; whether it is to be asked for anew."""
        self._owing.discard((line, piece))
        errand = self._errands.get(piece)
        if errand is None or line not in errand.lines:
            return False
        errand.lines.discard(line)
        if errand.lines:
            return False
        del self._errands[piece]
        self._pending.appendleft(piece)
        return True

    def _may_take(self, line: PieceSource, piece: Piece) -> bool:
        """An origin leaves to a model's own source what can still come from there."""
        if not self._may_give(line, piece):
            return False
        return not line.is_origin or not any(
            other.is_source and self._may_give(other, piece) for other in self._lines
        )

    def _may_give(self, line: PieceSource, piece: Piece) -> bool:
        if piece.is_hash:
            return line.is_origin
        if piece.needs_origin and not (line.is_origin or line.is_source):
            return False
        return line.has(piece.tensor) and line not in self._excluded.get(piece.kind, ())

    def _check_sources(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if not any(self._may_give(line, piece) for line in self._lines):
                self.error = self.error or SourceError(
                    f"{piece.tensor!r} cannot be fetched from anyone: "
                    + ("; ".join(self._reasons.values()) or "there is no source left"),
                    hint="check that the coordinator is running and can be reached",
                )
                return


Deliver = Callable[[PieceQueue, PieceSource, Piece, memoryview, bytes], None]
"""Takes in a piece, with the hash where that was asked for."""


def fetch_pieces(lines: Sequence[PieceSource], pieces: Iterable[Piece], deliver: Deliver) -> None:
    """Fetch all `pieces`, in about their order. `deliver` is called in the sources' threads, for several at once."""
    live = [line for line in lines if not line.is_dropped and not line.is_dialling]
    queue = PieceQueue(live, pieces)
    threads = {
        line: threading.Thread(
            target=line.work, args=(queue, deliver), name=f"fetch {line.name}", daemon=True
        )
        for line in live
    }
    for thread in threads.values():
        thread.start()
    queue.wait_over()
    laggards = queue.laggards()
    for line, thread in threads.items():
        if queue.error is not None or line in laggards:
            line.hang_up()
        if not line.is_dialling:
            thread.join()
    if isinstance(queue.error, ShardComputeError):
        raise queue.error
    if queue.error is not None:
        raise SourceError(f"fetching weights failed: {queue.error!r}") from queue.error
