"""Pictures in a prompt: where their rows lie, what a model's tower is given of them, and where a prompt may be cut.

A picture's rows are placeholders in the prompt. The first stage puts what the tower makes of the patches in their
place; every stage knows the spans, since positions, and in some models what rows see, depend on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardcompute.core.errors import UsageError

MAX_PICTURES = 64
"""In one prompt: each is a pass through the tower."""
MAX_GRID = 1 << 12
"""Patches along an edge of a picture."""
MAX_PATCHES = 1 << 13
"""Of one picture: attention between them costs their square."""

ENCODED_BYTES = 32 << 20
"""Of rows of pictures that a first stage keeps, in case the same are shown again."""
MAX_PICTURE_BYTES = 64 << 20
"""Of the patches of all pictures in a prompt: they are kept until it is answered."""


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """A picture's rows, `count` of them at positions `[start, start + count)`. `grid` is the picture in patches:
    (frames, rows, columns)."""

    start: int
    count: int
    grid: tuple[int, int, int]

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def patch_count(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a prompt. `patches` is what the tower takes, one patch behind the other, a byte for each channel
    of a pixel; `digest` tells it from others, wherever it lies."""

    span: PictureSpan
    patches: bytes = field(repr=False)
    digest: str


def digest_of(grid: tuple[int, int, int], patches: bytes) -> str:
    """The same picture has the same, on every machine."""
    return hashlib.sha256(b"%d,%d,%d:" % grid + patches).hexdigest()


def step_stop(spans: Sequence[PictureSpan], start: int, stop: int) -> int:
    """Where a step of rows from `start` on ends that was to end at `stop`, in models whose pictures may not be cut
    (`VisionSpec.is_bidirectional`): before a picture that it would cut or, if it begins with it, behind it."""
    for span in spans:
        if span.start < stop < span.stop:
            return span.start if span.start > start else span.stop
    return stop


def is_cut(spans: Sequence[PictureSpan], stop: int) -> bool:
    """Whether rows that end at `stop` end inside a picture."""
    return any(span.start < stop < span.stop for span in spans)


def check_spans(spans: Sequence[PictureSpan], length: int | None = None) -> None:
    """UsageError unless pictures lie one behind the other, in a prompt of `length` tokens, in sizes that can be."""
    if len(spans) > MAX_PICTURES:
        raise UsageError(
            f"a prompt has at most {MAX_PICTURES} pictures, not {len(spans)}", hint="send fewer pictures"
        )
    end = 0
    for span in spans:
        if span.start < end or span.count < 1 or (length is not None and span.stop > length):
            raise UsageError(
                f"a picture at rows {span.start} to {span.stop} overlaps another, or lies outside of its prompt"
            )
        if not all(1 <= edge <= MAX_GRID for edge in span.grid) or span.patch_count > MAX_PATCHES:
            raise UsageError(
                f"a picture of {'×'.join(map(str, span.grid))} patches is too large: {MAX_PATCHES} are the most",
                hint="send a smaller picture",
            )
        end = span.stop
