"""What a stage has sent on, kept so that a successor that is lost can be replaced without asking the whole chain.

For each session the log holds the activations of its rows from position 0 on, with their tokens and how the session
was opened. It is bounded: when it is full, the session that was written to longest ago is forgotten, and sessions
that began before the log did are never in it. A session that is not in the log whole is not in it at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardcompute.backends.matrix import Float32
from shardcompute.core.steps import Opening, Work


@dataclass(slots=True)
class _Track:
    opening: Opening | None
    ids: list[int] = field(default_factory=list)
    chunks: list[Float32] = field(default_factory=list)
    size_bytes: int = 0

    def extend(self, ids: Sequence[int], chunk: Float32) -> None:
        self.ids.extend(ids)
        self.chunks.append(chunk)
        self.size_bytes += chunk.nbytes

    def truncate(self, length: int) -> None:
        """Forget what lies behind; from the end, because nearly always nothing or little does."""
        while len(self.ids) > length:
            chunk = self.chunks.pop()
            self.size_bytes -= chunk.nbytes
            before = len(self.ids) - len(chunk)
            ids = self.ids[before:length]
            del self.ids[before:]
            if ids:
                self.extend(ids, chunk[: len(ids)].copy())


class BoundaryLog:
    """Not thread-safe: it belongs to the thread that computes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tracks: OrderedDict[int, _Track] = OrderedDict()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def append(self, work: Sequence[Work], openings: Sequence[Opening], rows: Float32) -> None:
        """Remember a step's output; `rows` is kept and must not change afterwards."""
        opened = {opening.session: opening for opening in openings}
        first = 0
        for part in work:
            chunk = rows[first : first + len(part.ids)]
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
        while self._used_bytes > self._limit_bytes and self._tracks:
            self.forget(next(iter(self._tracks)))

    def forget(self, session: int) -> None:
        track = self._tracks.pop(session, None)
        if track is not None:
            self._used_bytes -= track.size_bytes

    def clear(self) -> None:
        self._tracks.clear()
        self._used_bytes = 0

    def lengths(self) -> dict[int, int]:
        """How many tokens of each session the log holds."""
        return {session: len(track.ids) for session, track in self._tracks.items()}

    def replay(self, most_rows: int) -> Iterator[tuple[Work, Opening | None, Float32]]:
        """All that is known, session by session, in pieces of at most `most_rows` rows."""
        for session, track in self._tracks.items():
            rows = np.concatenate(track.chunks)
            track.chunks = [rows]
            for start in range(0, len(rows), most_rows):
                piece = rows[start : start + most_rows]
                work = Work(session, start, tuple(track.ids[start : start + len(piece)]))
                yield work, track.opening if start == 0 else None, piece
