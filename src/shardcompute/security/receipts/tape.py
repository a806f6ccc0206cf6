"""Tape of a session at a stage: what every row came in as and went out as, and what is signed of that.

Writing rows at `start` truncates, as it does in memory: a rejected draft that was not signed for is never mentioned,
and one that was is signed for again with what took its place. Rows are signed for once a whole block of them lies
behind what is being computed, and all of them where the tape is `cut`: when the answer has ended, or the chain has
another shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from shardcompute.security.receipts.records import (
    BLOCK_ROWS,
    MOST_BLOCKS,
    NO_DIGEST,
    BlockCommitment,
    Sign,
    TranscriptHeader,
    blocks_of,
    commitment_bytes,
    digest_rows,
    id_row,
)

NO_PICK = id_row(-1)
"""What goes out of a last stage for a row after which no token was picked."""
_KEPT_ROWS = 1024
"""So many rows that were signed for can still be written anew: more than drafts ever are ahead."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows from `start` on were computed in one epoch, live or as a replay."""

    start: int
    epoch: int
    is_replay: bool


class SessionTape:
    """One session at one stage. `length`: so many of the session's rows are known here."""

    def __init__(self, header: TranscriptHeader) -> None:
        self.header = header
        self.is_broken = False
        """Rows are missing: nothing more is signed for."""
        self._origin = self._first = self._signed = -1
        """Where the tape began, where what is kept of it begins, and up to where it is signed for."""
        self._ids: list[int] = []
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []
        self._frames: list[int] = []
        self._segments: list[_Segment] = []
        self._number = 0
        self._previous = NO_DIGEST

    @property
    def length(self) -> int:
        return self._first + len(self._ids) if self._origin >= 0 else 0

    def write(
        self,
        start: int,
        frame: int,
        epoch: int,
        ids: Sequence[int],
        inputs: Sequence[bytes],
        outputs: Sequence[bytes],
        sign: Sign,
        *,
        is_replay: bool = False,
    ) -> list[BlockCommitment]:
        """Rows of these tokens were computed, from `start` on. Returns what is signed for now that they follow."""
        if self.is_broken or not ids:
            return []
        if self._origin < 0 or start < self._origin:
            self._begin(start)
        if start > self.length or start < self._first:
            self.is_broken = True
            return []
        outputs = self._with_picks(start, ids, outputs)
        self._truncate(start)
        signed = self._commit(start - start % BLOCK_ROWS, sign)
        last = self._segments[-1] if self._segments else None
        if last is None or (last.epoch, last.is_replay) != (epoch, is_replay):
            signed += self._commit(start, sign, is_end=True)
            self._segments.append(_Segment(start, epoch, is_replay))
        self._ids += ids
        self._inputs += inputs
        self._outputs += outputs
        self._frames += [frame] * len(inputs)
        return signed

    def cut(self, length: int, sign: Sign) -> list[BlockCommitment]:
        """The first `length` rows are kept: sign for all of them that were not."""
        if self.is_broken or self._origin < 0:
            return []
        if length < self._first:
            self.is_broken = True
            return []
        self._truncate(length)
        return self._commit(self.length, sign, is_end=True)

    def _begin(self, start: int) -> None:
        self._origin = self._first = self._signed = start
        self._ids, self._inputs, self._outputs, self._frames, self._segments = [], [], [], [], []

    def _with_picks(self, start: int, ids: Sequence[int], outputs: Sequence[bytes]) -> Sequence[bytes]:
        """What was picked after a row stands where the same row is computed again and nothing is picked."""
        if not self.header.claim.is_last or start >= self.length:
            return outputs
        at = start - self._first
        kept = list(outputs)
        for index, (former, picked) in enumerate(zip(self._ids[at:], self._outputs[at:], strict=True)):
            if index < len(kept) and kept[index] == NO_PICK and former == ids[index]:
                kept[index] = picked
        return kept

    def _truncate(self, length: int) -> None:
        at = length - self._first
        del self._ids[at:], self._inputs[at:], self._outputs[at:], self._frames[at:]
        while self._segments and self._segments[-1].start >= length:
            self._segments.pop()
        if self._signed > length:
            begun = self._segments[-1].start if self._segments else self._first
            self._signed = max(length - length % BLOCK_ROWS, begun)

    def _commit(self, limit: int, sign: Sign, *, is_end: bool = False) -> list[BlockCommitment]:
        """Sign for rows of the newest segment up to `limit`: whole blocks, or at its end all of them."""
        start, step = self._signed, MOST_BLOCKS * BLOCK_ROWS
        if not self._segments or start >= limit or (not is_end and limit - start < BLOCK_ROWS):
            return []
        made = [
            self._signed_for(max(edge, start), min(edge + step, limit), self._segments[-1], sign)
            for edge in range(start - start % BLOCK_ROWS, limit, step)
        ]
        self._signed = limit
        self._drop_signed()
        return made

    def _signed_for(self, start: int, stop: int, segment: _Segment, sign: Sign) -> BlockCommitment:
        blocks = [(a - self._first, b - self._first) for a, b in blocks_of(start, stop)]
        made = BlockCommitment(
            number=self._number,
            epoch=segment.epoch,
            start=start,
            stop=stop,
            is_replay=segment.is_replay,
            frames=[max(self._frames[a:b]) for a, b in blocks],
            inputs=[digest_rows(self._inputs[a:b]) for a, b in blocks],
            outputs=[] if segment.is_replay else [digest_rows(self._outputs[a:b]) for a, b in blocks],
            previous=self._previous,
        )
        signed_bytes = commitment_bytes(self.header, made)
        self._number += 1
        self._previous = hashlib.sha256(signed_bytes).digest()
        return replace(made, signature=sign(signed_bytes))

    def _drop_signed(self) -> None:
        """Forget what was signed for long ago."""
        extra = self._signed - self._first - _KEPT_ROWS
        if extra >= _KEPT_ROWS:
            extra -= extra % BLOCK_ROWS
            del self._ids[:extra], self._inputs[:extra], self._outputs[:extra], self._frames[:extra]
            self._first += extra
