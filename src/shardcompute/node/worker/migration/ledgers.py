"""Ledgers of a copy of KV: which rows of which sessions were sent, and which have come. Pure: no link, clock or thread.

Rows are written where they begin, and that truncates: here, on the way, and there. Whoever sends hears of each write
and sends again what is not there any more as it was sent. Whoever receives believes nothing before every source has
*sealed* its part: said that nothing is computed there any more, and how long each session is. Until then a row may have
changed since it was sent, so that a copy which ends early has brought nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shardcompute.core.errors import LinkError


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows `[start, stop)` of a session."""

    session: int
    start: int
    stop: int


@dataclass(slots=True)
class SendLedger:
    """What the other side has of the sessions of a stage, as they are here."""

    _sent: dict[int, int] = field(default_factory=dict)

    def wrote(self, session: int, start: int) -> None:
        """Rows from `start` on are others from now on. Before, or while, they are written."""
        if session in self._sent:
            self._sent[session] = min(self._sent[session], start)

    def take_ended(self, lengths: Mapping[int, int]) -> list[int]:
        """Sessions of which something was sent and that are no more, now that those with these lengths are."""
        ended = [session for session in self._sent if session not in lengths]
        for session in ended:
            del self._sent[session]
        return ended

    def take_next(self, lengths: Mapping[int, int], most_rows: int) -> RowSpan | None:
        """Rows to send now, which count as sent; None: the other side has all that is here."""
        for session, length in lengths.items():
            sent = self._sent.get(session, 0)
            if sent < length:
                stop = min(length, sent + most_rows)
                self._sent[session] = stop
                return RowSpan(session, sent, stop)
        return None


class ReceiveLedger:
    """What has come of the sessions of a stage, from those that hold parts of its layers."""

    def __init__(self, layers: range, sources: Sequence[range]) -> None:
        """LinkError unless the sources have every layer once."""
        ordered = sorted(sources, key=lambda each: each.start)
        edges = [layers.start, *(each.stop for each in ordered)]
        is_whole = all(each.start == edge for each, edge in zip(ordered, edges, strict=False))
        if not ordered or not is_whole or edges[-1] != layers.stop or any(a >= b for a, b in pairwise(edges)):
            raise LinkError(f"layers {layers.start} to {layers.stop} do not come once each from {sources}")
        self._held: list[dict[int, int]] = [{} for _ in sources]
        self._sealed: list[Mapping[int, int] | None] = [None] * len(sources)
        self._refused: set[int] = set()

    @property
    def is_sealed(self) -> bool:
        return all(sealed is not None for sealed in self._sealed)

    def check(self, source: int, rows: RowSpan) -> bool:
        """Whether these rows are to be written; not those of sessions that were refused. LinkError where they leave a
        gap, or come after the last word."""
        if self._sealed[source] is not None:
            raise LinkError("rows came after the last word of their sender")
        held = self._held[source].get(rows.session, 0)
        if rows.start > held:
            raise LinkError(f"session {rows.session} has {held} rows here; those at {rows.start} leave a gap")
        return rows.session not in self._refused

    def took(self, source: int, rows: RowSpan) -> None:
        """These rows were written: what came behind them before is void."""
        self._held[source][rows.session] = rows.stop

    def refuse(self, source: int, rows: RowSpan) -> None:
        """There is no room for the session: nothing more of it is written."""
        self._refused.add(rows.session)
        self.took(source, rows)

    def ended(self, source: int, sessions: Iterable[int]) -> list[int]:
        """One source has these no more. Those of which no source has anything any more, whose memory can be freed: what
        others have sent may be of a session that has begun anew."""
        for session in sessions:
            self._held[source].pop(session, None)
        return [session for session in sessions if not any(session in held for held in self._held)]

    def seal(self, source: int, lengths: Mapping[int, int]) -> None:
        self._sealed[source] = dict(lengths)

    def whole(self) -> dict[int, int]:
        """The sessions that can go on here, each with how many rows all sources have sent of it. None unless all of
        them have sealed."""
        sealed = [each for each in self._sealed if each is not None]
        if len(sealed) < len(self._sealed):
            return {}
        lengths: dict[int, int] = {}
        for session in set.intersection(*(set(each) for each in sealed)) - self._refused:
            parts = list(zip(self._held, sealed, strict=True))
            if all(held.get(session, 0) >= told[session] for held, told in parts):
                lengths[session] = min(told[session] for _, told in parts)
        return lengths
