"""A ragged batch: rows of several sessions, flattened.

Prefill chunks, decode steps and verification of drafts are the same thing: `count` rows of a session from
position `start` on. A segment that starts before the session's end truncates it there first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE_TOKENS = 64
"""KV memory is given out in pages of this many tokens."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` rows of `session` at positions `[start, start + count)`; logits of the last `logit_rows` of them. With an
    `adapter`, what the one of that number adds is added to them (`backends.host.low_rank`)."""

    session: int
    start: int
    count: int
    logit_rows: int = 0
    adapter: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.count


def count_rows(segments: Sequence[Segment]) -> int:
    return sum(segment.count for segment in segments)


def row_adapters(segments: Sequence[Segment]) -> list[int]:
    """The number of each row's adapter."""
    return [segment.adapter for segment in segments for _ in range(segment.count)]


def logit_row_indices(segments: Sequence[Segment]) -> list[int]:
    """Indices, in the flattened batch, of the rows whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for segment in segments:
        end += segment.count
        rows.extend(range(end - segment.logit_rows, end))
    return rows
