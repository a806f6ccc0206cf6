"""KV of sessions in llama.cpp's streams, and beside them while there are more sessions than streams.

A stream is a fixed number of cells, all of it allocated at start. Half of the KV memory is streams; the other half
bounds what sessions without a stream hold, packed, until their next rows bring them back with the same bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardcompute.backends.kv import PageBudget
from shardcompute.backends.llamacpp.stage_context import MAX_STREAMS, STREAM_MULTIPLE, StageContext
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import CapacityError

_MOST_STREAMS = 16


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How KV memory is shared out: `streams` of `stream_tokens` each, and sessions of `total_tokens` in all."""

    streams: int
    stream_tokens: int
    total_tokens: int


def plan_streams(kv_bytes: int, token_bytes: int, context_length: int) -> StreamPlan:
    """CapacityError where the memory does not hold the shortest stream twice."""
    tokens = kv_bytes // max(1, token_bytes)
    # One cell more than the context: where rows are computed in pairs, the last one has a neighbour, too.
    wanted = -(-(context_length + 1) // STREAM_MULTIPLE) * STREAM_MULTIPLE
    stream_tokens = min(wanted, tokens // 2 // STREAM_MULTIPLE * STREAM_MULTIPLE)
    if stream_tokens < STREAM_MULTIPLE:
        needed = 2 * STREAM_MULTIPLE * token_bytes
        raise CapacityError(
            f"{kv_bytes} bytes of KV memory are too few for llama.cpp: {needed} hold two sessions of "
            f"{STREAM_MULTIPLE} tokens",
            hint="give more with --kv-memory",
        )
    streams = max(1, min(_MOST_STREAMS, MAX_STREAMS, tokens // 2 // stream_tokens))
    rest = tokens - streams * stream_tokens
    return StreamPlan(streams, stream_tokens, max(rest, 0))


class StreamKv:
    """Which session lies in which stream, or packed beside them."""

    def __init__(
        self, context: StageContext, plan: StreamPlan, token_bytes: int, context_length: int
    ) -> None:
        self._context = context
        self._streams = plan.streams
        self._placed: dict[int, int] = {}
        """The stream of a session, least recently used first."""
        self._packed: dict[int, bytes] = {}
        self._free = list(range(plan.streams))
        self.budget = PageBudget(
            max(1, token_bytes * PAGE_TOKENS),
            plan.total_tokens // PAGE_TOKENS,
            min(context_length, plan.stream_tokens - 1),
        )

    @property
    def streams(self) -> int:
        return self._streams

    def place(self, sessions: Collection[int]) -> dict[int, int]:
        """Have these sessions in streams, at most as many as there are: the stream of each."""
        for session in sessions:
            if session in self._placed:
                self._placed[session] = self._placed.pop(session)
        for session in sessions:
            if session not in self._placed:
                stream = self._free_stream(sessions)
                packed = self._packed.pop(session, None)
                if packed is not None:
                    self._context.restore(stream, packed)
                self._placed[session] = stream
        return {session: self._placed[session] for session in sessions}

    def take(self, segment: Segment) -> None:
        """Truncate a placed session at the segment's start, and count its rows."""
        if segment.start < self.budget.lengths.get(segment.session, 0):
            self._context.truncate(self._placed[segment.session], segment.start)
        self.budget.take(segment)

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool) -> None:
        """See `Executor.adopt`."""
        held = self.budget.lengths.get(source, 0)
        self.budget.adopt(source, target, length, is_moved=is_moved)
        self._drop(target)
        if is_moved:
            if source in self._placed:
                self._placed[target] = self._placed.pop(source)
            else:
                self._packed[target] = self._packed.pop(source)
        else:
            packed = self._packed.get(source) or self._context.save(self._placed[source])
            self._packed[target] = packed
        if length < held:
            self._context.truncate(self.place([target])[target], length)

    def release(self, session: int) -> None:
        self.budget.release(session)
        self._drop(session)

    def _drop(self, session: int) -> None:
        self._packed.pop(session, None)
        stream = self._placed.pop(session, None)
        if stream is not None:
            self._context.truncate(stream, 0)
            heapq.heappush(self._free, stream)

    def _free_stream(self, kept: Collection[int]) -> int:
        """The lowest free stream, so that sessions lie side by side; if there is none, the longest unused one's."""
        if not self._free:
            session = next(session for session in self._placed if session not in kept)
            stream = self._placed.pop(session)
            self._packed[session] = self._context.save(stream)
            self._context.truncate(stream, 0)
            heapq.heappush(self._free, stream)
        return heapq.heappop(self._free)


def groups(segments: Sequence[Segment], size: int) -> list[Sequence[Segment]]:
    """The segments in order, at most `size` at a time."""
    return [segments[start : start + size] for start in range(0, len(segments), size)]
