"""What a stage sends to a new next one: all that this one would have got, had it been there from the start."""

from __future__ import annotations

from collections.abc import Iterator

from shardcompute.node.rpc.commands import Wire
from shardcompute.node.rpc.frames import REPLAY, opened_of, segment_of
from shardcompute.node.worker.activation_log import Chunk
from shardcompute.node.worker.slot import StageSlot
from shardcompute.wire import StepFrame, find_codec
from shardcompute.wire.codecs.mode import EXACT

_ROWS = 256


def replay_frames(slot: StageSlot) -> Iterator[tuple[StepFrame, list[memoryview]]]:
    """Frames with their bodies, in the order in which they must be sent."""
    for work, opening, chunk in slot.log.replay(_ROWS):
        codec, body = _body_of(chunk, slot.place.wire)
        frame = StepFrame(
            chain=slot.chain,
            epoch=slot.place.epoch,
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
