"""Activation log: what a stage has sent on, so that a lost successor is replaced without asking the whole chain.

For each session the log holds its rows from position 0 on as they were sent, packed by a codec, with their tokens and
how the session was opened: a successor that is told all of it gets the bits that the lost one got. It is bounded:
when it is full, the session that was written to longest ago is forgotten, and sessions that began before the log did
are never in it. A session that is not in the log whole is not in it at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from shardcompute.backends.executor import MAX_ROWS
from shardcompute.core.pictures import PictureSpan, step_stop
from shardcompute.core.steps import Opening, Prefix, SessionRows
from shardcompute.node.rpc.commands import Wire
from shardcompute.node.rpc.frames import REPLAY, opened_of, segment_of
from shardcompute.wire import PackedRows, StepFrame, find_codec
from shardcompute.wire.codecs.mode import EXACT

_REPLAY_ROWS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows in the form that a codec of `wire.codecs` packs them into."""

    codec: str
    width: int
    rows: PackedRows

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, stop: int) -> Chunk:
        return Chunk(self.codec, self.width, self.rows[start:stop])

    def copy(self) -> Chunk:
        return Chunk(self.codec, self.width, self.rows.copy())


@dataclass(slots=True)
class _Track:
    opening: Opening | None
    ids: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    size_bytes: int = 0

    def extend(self, ids: Sequence[int], chunk: Chunk) -> None:
        self.ids.extend(ids)
        self.chunks.append(chunk)
        self.size_bytes += chunk.rows.nbytes

    def truncate(self, length: int) -> None:
        """Forget what lies behind; from the end, because nearly always nothing or little does."""
        while len(self.ids) > length:
            chunk = self.chunks.pop()
            self.size_bytes -= chunk.rows.nbytes
            before = len(self.ids) - len(chunk)
            ids = self.ids[before:length]
            del self.ids[before:]
            if ids:
                self.extend(ids, chunk.part(0, len(ids)).copy())

    def merge(self) -> None:
        """Make one chunk of neighbours in the same form."""
        self.chunks = [
            Chunk(codec, width, np.concatenate([chunk.rows for chunk in chunks]))
            for (codec, width), chunks in groupby(self.chunks, key=lambda chunk: (chunk.codec, chunk.width))
        ]


class ActivationLog:
    """Not thread-safe: it belongs to the thread that computes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tracks: OrderedDict[int, _Track] = OrderedDict()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def limit(self, limit_bytes: int) -> None:
        """From now on; what is too much is forgotten at once."""
        self._limit_bytes = limit_bytes
        self._trim()

    def append(self, work: Sequence[SessionRows], openings: Sequence[Opening], sent: Chunk) -> None:
        """Remember a step's output; `sent` is kept and must not change afterwards."""
        # Whoever is told of a session by this log is no first stage, and needs no patches.
        openings = [replace(opening, patches=()) if opening.patches else opening for opening in openings]
        opened = {opening.session: opening for opening in openings}
        first = 0
        for opening in openings:
            if opening.prefix is not None:
                self._adopt(opening, opening.prefix)
        for part in work:
            chunk = sent.part(first, first + len(part.ids))
            first += len(part.ids)
            track = self._tracks.get(part.session)
            if part.start == 0:
                self.forget(part.session)
                track = _Track(opened.get(part.session) or (track.opening if track else None))
            if track is None or part.start > len(track.ids):
                self.forget(part.session)
                continue
            self._used_bytes -= track.size_bytes if part.session in self._tracks else 0
            track.truncate(part.start)
            # A view would keep the rows of all sessions of the step alive, uncounted.
            track.extend(part.ids, chunk if len(work) == 1 else chunk.copy())
            self._used_bytes += track.size_bytes
            self._tracks[part.session] = track
            self._tracks.move_to_end(part.session)
        self._trim()

    def _trim(self) -> None:
        while self._used_bytes > self._limit_bytes and self._tracks:
            self.forget(next(iter(self._tracks)))

    def _adopt(self, opening: Opening, prefix: Prefix) -> None:
        """Begin a session with another's rows, where they are all here."""
        self.forget(opening.session)
        source = self._tracks.get(prefix.source)
        if source is None or len(source.ids) < prefix.length:
            return
        # Whoever is told of the session by this log gets its rows from the start, with no prefix to share.
        track = _Track(
            replace(opening, prefix=None), list(source.ids), list(source.chunks), source.size_bytes
        )
        track.truncate(prefix.length)
        self._tracks[opening.session] = track
        self._used_bytes += track.size_bytes
        if prefix.is_moved:
            self.forget(prefix.source)

    def forget(self, session: int) -> None:
        track = self._tracks.pop(session, None)
        if track is not None:
            self._used_bytes -= track.size_bytes

    def all_sent(self, session: int) -> tuple[bytes, list[Chunk]]:
        """The nonce of the receipt that a session is to have, and all that was sent of it from its first row on;
        nothing where it is not here, or wants none."""
        track = self._tracks.get(session)
        nonce = b"" if track is None or track.opening is None else track.opening.receipt_nonce
        return (nonce, list(track.chunks)) if track is not None and nonce else (b"", [])

    def clear(self) -> None:
        self._tracks.clear()
        self._used_bytes = 0

    def lengths(self, wanted: Callable[[int], bool] = lambda session: True) -> dict[int, int]:
        """How many tokens of each `wanted` session the log holds."""
        return {session: len(track.ids) for session, track in self._tracks.items() if wanted(session)}

    def replay(
        self, most_rows: int, wanted: Callable[[int], bool] = lambda session: True
    ) -> Iterator[tuple[SessionRows, Opening | None, Chunk]]:
        """All that is known of `wanted` sessions, one after the other, in pieces of at most `most_rows` rows."""
        for session, track in self._tracks.items():
            if not wanted(session):
                continue
            track.merge()
            position = 0
            spans = () if track.opening is None else track.opening.spans
            for chunk in track.chunks:
                before = position
                while position < before + len(chunk):
                    stop = _uncut(spans, position, min(position + most_rows, before + len(chunk)))
                    piece = chunk.part(position - before, stop - before)
                    work = SessionRows(session, position, tuple(track.ids[position : position + len(piece)]))
                    yield work, track.opening if position == 0 else None, piece
                    position += len(piece)


def _uncut(spans: Sequence[PictureSpan], start: int, stop: int) -> int:
    """Where a piece of rows ends that was to end at `stop`. In some models a picture is computed in one step: none is
    cut that was sent in one."""
    whole = step_stop(spans, start, stop)
    return whole if whole - start <= MAX_ROWS else stop


def replay_frames(
    log: ActivationLog,
    chain: str,
    epoch: int,
    wire: Wire,
    wanted: Callable[[int], bool] = lambda session: True,
) -> Iterator[tuple[StepFrame, list[memoryview]]]:
    """What a new next stage is sent, in order: all that it would have got of `wanted` sessions, had it been there from
    the start."""
    for work, opening, chunk in log.replay(_REPLAY_ROWS, wanted):
        codec, body = _body_of(chunk, wire)
        frame = StepFrame(
            chain=chain,
            epoch=epoch,
            sequence=REPLAY,
            segments=[segment_of(work)],
            rows=len(chunk),
            width=chunk.width,
            codec=codec,
            replay=True,
            opens=[] if opening is None else [opened_of(opening)],
        )
        yield frame, body


def _body_of(chunk: Chunk, wire: Wire) -> tuple[str, list[memoryview]]:
    """Logged rows as they were sent; a stage that cannot read that form gets the same values exactly."""
    codec = find_codec(chunk.codec)
    if chunk.codec in wire.codecs:
        return chunk.codec, codec.wrap(chunk.rows)
    return EXACT, find_codec(EXACT).encode(codec.rows.unpack(chunk.rows, chunk.width))
