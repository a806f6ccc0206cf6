"""Pieces of tensors from the hub or a mirror of it: ranges of the files in which the model's source map says they lie.

A few requests are under way at once; pieces that lie behind each other in a file come with one. An answer that breaks
off is continued where it stopped. A hub that is busy or asks for patience is left alone for so long while others take
its pieces; after several failures in a row, or one that will not pass, it is not asked again. What it gives is no more
than a claim: the hash of a whole tensor is compared with what others have read (see `client`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from shardcompute.core.errors import CorruptModelError, SourceError, UnknownModelError
from shardcompute.node.weights.pieces import RETRY_DELAYS_S, Deliver, Piece, PieceQueue
from shardcompute.weights.formats.tensor_file import weave
from shardcompute.weights.source_map import SourceMap, units_of
from shardcompute.weights.sources.hub import Hub, HubBytes
from shardcompute.weights.sources.rate import RateLimit
from shardcompute.weights.sources.retry import TRANSIENT, UNREACHABLE, BusyError

log = logging.getLogger(__name__)
_CONNECTIONS = 4
_RUN_BYTES = 8 << 20
_GAP_BYTES = 64 << 10
"""So much between two pieces is read and thrown away rather than asked for around."""
_ADVANCE_BYTES = 64 << 10
"""An answer that broke off after at least so much is continued at once."""
_LONGEST_WAIT_S = 60.0
_DELAYS_UNREACHABLE = 2


class HubLine:
    """One hub or mirror, as a source of pieces."""

    is_origin = False
    is_source = True

    def __init__(
        self,
        hub: Hub,
        source: SourceMap,
        rate: RateLimit | None = None,
        *,
        delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        self.name = urlsplit(hub.url).netloc
        self.is_dropped = False
        self._source = source
        self._rate = rate
        self._delays_s = delays_s
        listing = source.listing
        self._files = [hub.open(listing, file.name) for file in source.files]
        self._lock = threading.Lock()
        self._active = 0
        self._is_hung_up = False
        self._failures = 0
        self._failed_s = 0.0
        self._resume_s = 0.0

    @property
    def is_dialling(self) -> bool:
        """True while a request that nobody waits for any more has not ended."""
        with self._lock:
            return self._is_hung_up and self._active > 0

    def has(self, tensor: str) -> bool:
        return tensor in self._source.places

    def drop(self) -> None:
        self.is_dropped = True
        self.hang_up()

    def hang_up(self) -> None:
        with self._lock:
            self._is_hung_up = True

    def say_goodbye(self) -> None:
        self.hang_up()

    def work(self, queue: PieceQueue, deliver: Deliver) -> None:
        with self._lock:
            self._is_hung_up = False
        names = [f"fetch {self.name} {number}" for number in range(1, _CONNECTIONS)]
        threads = [
            threading.Thread(target=self._work, args=(queue, deliver), name=name, daemon=True)
            for name in names
        ]
        for thread in threads:
            thread.start()
        self._work(queue, deliver)
        for thread in threads:
            thread.join()

    def _work(self, queue: PieceQueue, deliver: Deliver) -> None:
        while not self.is_dropped and queue.await_piece(self):
            if queue.wait_over(max(0.0, self._resume_s - time.monotonic())):
                return
            run = self._take_run(queue)
            if not run:
                continue
            began_s = time.monotonic()
            with self._lock:
                self._active += 1
            try:
                self._fetch_run(run, queue, deliver)
                self._failures = 0
            except (BusyError, *TRANSIENT) as error:
                self._fail(queue, run, error, began_s)
            except (SourceError, UnknownModelError, CorruptModelError) as error:
                # It names itself, and will say the same about every other piece.
                self._give_up(queue, run, error)
            except Exception as error:
                queue.fail(error)
                return
            finally:
                with self._lock:
                    self._active -= 1

    def _take_run(self, queue: PieceQueue) -> list[Piece]:
        """A piece, and those that follow it in its file."""
        first = queue.take(self, is_patient=True)
        if first is None:
            return []
        run = [first]
        while (
            piece := queue.take(self, is_patient=False, is_wanted=lambda p: self._follows(run, p))
        ) is not None:
            run.append(piece)
        return run

    def _follows(self, run: Sequence[Piece], piece: Piece) -> bool:
        if len(self._source.places[piece.tensor]) > 1 or len(self._source.places[run[0].tensor]) > 1:
            return False
        file, begin, _ = self._range(run[0])
        _, last, length = self._range(run[-1])
        other, start, more = self._range(piece)
        gap_bytes = start - (last + length)
        return other == file and 0 <= gap_bytes <= _GAP_BYTES and start + more - begin <= _RUN_BYTES

    def _range(self, piece: Piece) -> tuple[int, int, int]:
        return next(self._source.ranges(piece.tensor, (piece.start, piece.stop)))

    def _fetch_run(self, run: Sequence[Piece], queue: PieceQueue, deliver: Deliver) -> None:
        if len(self._source.places[run[0].tensor]) > 1:
            self._deliver(queue, deliver, run[0], self._read_woven(run[0], queue))
            return
        file, begin, _ = self._range(run[0])
        _, last, length = self._range(run[-1])
        content = self._read(self._files[file], begin, last + length - begin, queue)
        for piece in run:
            _, start, length = self._range(piece)
            self._deliver(queue, deliver, piece, content[start - begin : start - begin + length])

    def _deliver(self, queue: PieceQueue, deliver: Deliver, piece: Piece, content: memoryview) -> None:
        if queue.claim(self, piece):
            deliver(queue, self, piece, content, b"")
            queue.finish()

    def _read_woven(self, piece: Piece, queue: PieceQueue) -> memoryview:
        place, span = self._source.places[piece.tensor], (piece.start, piece.stop)
        parts = [
            self._read(self._files[file], offset, length, queue)
            for file, offset, length in self._source.ranges(piece.tensor, span)
        ]
        sizes = [unit_bytes for _, _, unit_bytes in place]
        start = piece.start - units_of(place, span)[0] * sum(sizes)
        return weave(parts, sizes)[start : start + piece.stop - piece.start]

    def _read(self, file: HubBytes, start: int, length: int, queue: PieceQueue) -> memoryview:
        view = memoryview(bytearray(length))
        done = 0
        while done < length:
            before = done
            try:
                for chunk in file.stream(start + done, start + length):
                    view[done : done + len(chunk)] = chunk
                    done += len(chunk)
                    if self._is_hung_up or self._pause(queue, len(chunk)):
                        raise BusyError("nobody waits for it any more")
            except (BusyError, *TRANSIENT):
                if done - before < _ADVANCE_BYTES or self._is_hung_up or queue.is_over:
                    raise
        return view

    def _pause(self, queue: PieceQueue, count_bytes: int) -> bool:
        """Keep to the rate; whether the fetch is over meanwhile."""
        wait_s = self._rate.spend(count_bytes) if self._rate is not None else 0.0
        return wait_s > 0 and queue.wait_over(wait_s)

    def _fail(self, queue: PieceQueue, run: Sequence[Piece], error: Exception, began_s: float) -> None:
        """It may pass: leave the hub alone for a while, and its pieces to others."""
        if self._is_hung_up or queue.is_over:
            queue.give_back(self, run, None)
            return
        asked_s = error.wait_s if isinstance(error, BusyError) else None
        with self._lock:
            # What was under way when another request failed fails for the same reason.
            self._failures += began_s >= self._failed_s
            self._failed_s = time.monotonic()
            delays_s = (
                self._delays_s[:_DELAYS_UNREACHABLE] if isinstance(error, UNREACHABLE) else self._delays_s
            )
            has_given_up = self._failures > len(delays_s) or (asked_s or 0.0) > _LONGEST_WAIT_S
            wait_s = 0.0 if has_given_up else max(asked_s or 0.0, delays_s[max(0, self._failures - 1)])
            self._resume_s = max(self._resume_s, self._failed_s + wait_s)
        if has_given_up:
            self._give_up(queue, run, error)
        else:
            queue.give_back(self, run, None)

    def _give_up(self, queue: PieceQueue, run: Sequence[Piece], error: Exception) -> None:
        reason = str(error) or type(error).__name__
        if not self.is_dropped:
            log.warning("weights are no longer read from %s, but from others: %s", self.name, reason)
        self.is_dropped = True
        queue.give_back(self, run, SourceError(f"{self.name}: {reason}"))


def file_order(source: SourceMap) -> Mapping[str, tuple[int, int]]:
    """By tensor, where it begins: what is asked for in this order lies in runs."""
    return {name: place[0][:2] for name, place in source.places.items()}
