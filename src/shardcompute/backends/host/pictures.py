"""Pictures of the sessions of one executor: the rows that a tower made of them, and what they do to rows of the text.

A picture that was encoded is kept for a while: the same bytes, shown again, need no tower. It may be encoded by another
thread, before a session shows it.

Rows inside a picture may turn by its rows and columns, those behind it go on where it ends, and rows of one picture may
see each other. Sessions without pictures are untouched by all of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.executor import PictureNetwork, refuse_pictures
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment, count_rows
from shardcompute.core.errors import UsageError
from shardcompute.core.pictures import ENCODED_BYTES, PictureSpan, check_spans, digest_of, is_cut

Indices = NDArray[np.int64]
Encode = Callable[[PictureSpan, bytes], Float32]
"""The rows of one picture `[count, hidden]`."""


class SessionPictures:
    """`encode` is the tower's, None in slices behind the first. `max_rows` has a step, `context_length` a session;
    `scale` is what rows are divided by beforehand."""

    def __init__(
        self,
        network: PictureNetwork | None,
        encode: Encode | None,
        *,
        max_rows: int,
        context_length: int,
        scale: float = 1.0,
    ) -> None:
        self._network = network
        self._encode = encode
        self._max_rows = max_rows
        self._context_length = context_length
        self._scale = np.float32(scale)
        self._encoded: OrderedDict[str, Float32] = OrderedDict()
        """By digest, those that were shown last at the end."""
        self._pinned: set[str] = set()
        self._lock = threading.Lock()
        self._encoding = threading.Lock()
        """A tower looks at one picture at a time."""
        self._spans: dict[int, tuple[PictureSpan, ...]] = {}
        self._rows: dict[int, tuple[Float32 | None, ...]] = {}

    def open(self, session: int, spans: Sequence[PictureSpan], patches: Sequence[bytes] | None) -> None:
        """See `Executor.open_pictures`."""
        sent = self._checked(spans, patches)
        self.forget(session)
        if self._encode is not None:
            rows = (
                None if each is None else self._look_at(span, each)
                for span, each in zip(spans, sent, strict=True)
            )
            self._rows[session] = tuple(rows)
        self._spans[session] = tuple(spans)

    def needs_encoding(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> bool:
        """See `EncodingExecutor`."""
        if self._encode is None:
            return False
        shown = [digest_of(span.grid, each) for span, each in zip(spans, patches, strict=False) if each]
        with self._lock:
            return any(digest not in self._encoded for digest in shown)

    def encode(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> None:
        """See `EncodingExecutor.encode_pictures`."""
        sent = self._checked(spans, patches)
        shown = [(span, each) for span, each in zip(spans, sent, strict=True) if each is not None]
        if self._encode is not None:
            # However many they are, they stay until the next ones come.
            pinned = {digest_of(span.grid, each) for span, each in shown}
            with self._lock:
                self._pinned = pinned
            for span, each in shown:
                self._look_at(span, each)

    def _checked(
        self, spans: Sequence[PictureSpan], patches: Sequence[bytes] | None
    ) -> Sequence[bytes | None]:
        """The patches of each; None where none were sent."""
        network = self._network
        if network is None:
            raise refuse_pictures("this model, as it was loaded,")
        check_spans(spans, self._context_length)
        if patches is not None and len(patches) != len(spans):
            raise UsageError(f"{len(spans)} pictures came with the patches of {len(patches)}")
        sent = [None] * len(spans) if patches is None else [each or None for each in patches]
        for span, each in zip(spans, sent, strict=True):
            network.check(span, each)
            if network.is_bidirectional and span.count > self._max_rows:
                raise UsageError(
                    f"a picture of {span.count} rows cannot be cut, and a step here has {self._max_rows}"
                )
        return sent

    def _look_at(self, span: PictureSpan, patches: bytes) -> Float32:
        """The rows of a picture, of before or of the tower."""
        assert self._encode is not None
        digest = digest_of(span.grid, patches)
        with self._encoding:
            with self._lock:
                known = self._encoded.get(digest)
                if known is not None:
                    self._encoded.move_to_end(digest)
                    return known
            rows = self._encode(span, patches)
            rows = rows if self._scale == 1 else rows / self._scale
            with self._lock:
                self._encoded[digest] = rows
                self._forget_oldest()
        return rows

    def _forget_oldest(self) -> None:
        """Needs the lock."""
        size = sum(rows.nbytes for rows in self._encoded.values())
        for digest in [each for each in self._encoded if each not in self._pinned]:
            if size <= ENCODED_BYTES:
                return
            size -= self._encoded.pop(digest).nbytes

    def forget(self, session: int) -> None:
        self._spans.pop(session, None)
        self._rows.pop(session, None)

    def are_in(self, segments: Sequence[Segment]) -> bool:
        return bool(self._spans) and any(segment.session in self._spans for segment in segments)

    def check(self, segments: Sequence[Segment]) -> None:
        """UsageError, before anything changes, for rows that end inside a picture whose rows see each other, and for
        those of a picture that was not sent."""
        for segment in segments:
            spans = self._spans.get(segment.session, ())
            network = self._network
            if network is not None and network.is_bidirectional and is_cut(spans, segment.stop):
                raise UsageError(
                    f"rows {segment.start} to {segment.stop} of session {segment.session} end inside a picture"
                )
            for span, rows in zip(spans, self._rows.get(segment.session, ()), strict=False):
                if rows is None and span.start < segment.stop and segment.start < span.stop:
                    raise UsageError(
                        f"the picture at row {span.start} of session {segment.session} was not sent here"
                    )

    def rows(self, segments: Sequence[Segment]) -> Iterator[tuple[slice, Float32]]:
        """Which rows of a step are those of pictures, and what they are instead of embedded tokens."""
        first = 0
        for segment in segments:
            spans, rows = self._spans.get(segment.session, ()), self._rows.get(segment.session, ())
            for span, encoded in zip(spans, rows, strict=False):
                start, stop = max(span.start, segment.start), min(span.stop, segment.stop)
                if encoded is not None and start < stop:
                    place = slice(first + start - segment.start, first + stop - segment.start)
                    yield place, encoded[start - span.start : stop - span.start]
            first += segment.count

    def positions(self, segments: Sequence[Segment]) -> Indices:
        """Positions `[3, rows]` by which rows turn: frame, row and column, all the same outside of pictures."""
        turns = np.empty((3, count_rows(segments)), dtype=np.int64)
        first = 0
        for segment in segments:
            here = turns[:, first : first + segment.count]
            here[:] = np.arange(segment.start, segment.stop)
            if self._network is not None and self._network.has_axes:
                self._shift(here, segment, self._network.merge)
            first += segment.count
        return turns

    def _shift(self, turns: Indices, segment: Segment, merge: int) -> None:
        """Pictures are as long as their longer edge: rows behind one are so many positions earlier."""
        for span in self._spans.get(segment.session, ()):
            rows, columns = span.grid[1] // merge, span.grid[2] // merge
            shift = span.count - max(rows, columns)
            start, stop = (
                min(max(edge, segment.start), segment.stop) - segment.start
                for edge in (span.start, span.stop)
            )
            index = np.arange(start, stop) + segment.start - span.start
            # Rows inside have one position more each, up to here: they all begin where the picture does.
            turns[:, start:stop] += (
                np.stack([index // (rows * columns), index // columns % rows, index % columns]) - index
            )
            turns[:, stop:] -= shift

    def ends(self, segment: Segment) -> Indices | None:
        """Where what each row of a segment sees ends; None where that is behind itself."""
        if self._network is None or not self._network.is_bidirectional:
            return None
        ends = None
        for span in self._spans.get(segment.session, ()):
            start, stop = max(span.start, segment.start), min(span.stop, segment.stop)
            if start < stop:
                ends = np.arange(segment.start, segment.stop) + 1 if ends is None else ends
                ends[start - segment.start : stop - segment.start] = span.stop
        return ends
