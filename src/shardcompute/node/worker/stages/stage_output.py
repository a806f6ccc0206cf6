"""Stage output: what a step sends on. Activations to the next stage, kept for replays; results to the driver.

Nothing is sent before the caller says so: what is made here can be made inside the step, and sent behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from shardcompute.backends.matrix import Array
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.steps import Draft, Opening, Picked, SessionRows
from shardcompute.node.rpc.frames import segment_of, step_failed, step_result, without_patches
from shardcompute.node.worker.activation_log import Chunk, replay_frames
from shardcompute.node.worker.codec_choice import choose_codec
from shardcompute.node.worker.receipts.signer import StepRows
from shardcompute.node.worker.receipts.stage_receipts import StageReceipts
from shardcompute.node.worker.stages.peer_links import PeerLinks
from shardcompute.node.worker.stages.slot import StageRoute, StageSlot
from shardcompute.wire import Codec, StageTiming, StepFrame, find_codec

log = logging.getLogger(__name__)


class StageOutput:
    """Of all stages of a worker, over its links. Of the computing thread alone."""

    def __init__(self, links: PeerLinks, receipts: StageReceipts) -> None:
        self._links = links
        self._receipts = receipts

    def of_step(
        self,
        slot: StageSlot,
        frame: StepFrame,
        work: Sequence[SessionRows],
        openings: Sequence[Opening],
        out: Array | list[Picked],
        drafts: Sequence[Draft],
        timing: StageTiming,
        body: memoryview,
    ) -> Callable[[], None]:
        """What sends a step: its results to the driver, or activations to the next stage. `body` is what came with the
        frame."""
        if not isinstance(out, list):
            return self._passed_on(slot, frame, work, openings, out, timing, body)
        self._note(slot, frame, body, work, openings, out)
        if frame.replay:
            return _send_nothing
        # The end of the chain: results straight to the driver.
        result = step_result(frame, out, drafts, [*frame.timings, timing])
        return lambda: self._links.send(slot.driver_of(frame), result)

    def replay(
        self, slot: StageSlot, wanted: Callable[[int], bool], on_sent: Callable[[], None]
    ) -> dict[int, int]:
        """Send the next stage what it would have got of `wanted` sessions, had it been there from the start."""
        lengths = slot.log.lengths(wanted)
        route = slot.route
        for frame, body in replay_frames(slot.log, slot.chain, route.epoch, route.wire, wanted):
            self._links.send(route.next, frame, body)
            on_sent()
        return lengths

    def report_failure(self, slot: StageSlot, frame: StepFrame, error: Exception) -> None:
        if not isinstance(error, ShardComputeError):
            log.exception("a step of chain %s failed", frame.chain)
        failed = step_failed(frame, error)
        driver = slot.driver_of(frame)
        if driver == slot.route.driver:
            self._links.open(driver)
        self._links.send(driver, failed)

    def _passed_on(
        self,
        slot: StageSlot,
        frame: StepFrame,
        work: Sequence[SessionRows],
        openings: Sequence[Opening],
        out: Array,
        timing: StageTiming,
        received: memoryview,
    ) -> Callable[[], None]:
        """Log what the next stage gets, as it gets it, and send it on unless it has that already."""
        started = time.perf_counter()
        rows, width = out.shape
        codec = self._choose_codec(slot.route, rows, width)
        # The executor reuses its output; log and link keep what they are given.
        packed = codec.rows.pack(np.array(out, dtype=np.float32))
        chunk = Chunk(codec.rows.name, width, packed)
        slot.log.append(work, openings, chunk)
        self._note(slot, frame, received, work, openings, chunk)
        if frame.replay:
            return _send_nothing
        body = codec.wrap(packed)
        sent = msgspec.structs.replace(
            timing,
            codec_s=timing.codec_s + time.perf_counter() - started,
            codec=codec.name,
            sent_bytes=sum(part.nbytes for part in body),
        )
        passed = StepFrame(
            chain=frame.chain,
            epoch=frame.epoch,
            sequence=frame.sequence,
            segments=[segment_of(part) for part in work],
            rows=rows,
            width=width,
            codec=codec.name,
            opens=[without_patches(opened) for opened in frame.opens],
            timings=[*frame.timings, sent],
        )
        return lambda: self._links.send(slot.route.next, passed, body)

    def _note(
        self,
        slot: StageSlot,
        frame: StepFrame,
        body: memoryview,
        work: Sequence[SessionRows],
        openings: Sequence[Opening],
        out: Chunk | list[Picked],
    ) -> None:
        """For those answers that are to have a receipt."""
        if slot.claim is not None and self._receipts.concerns(frame.chain, work, openings):
            driver = slot.route.owner([part.session for part in work])
            self._receipts.computed(StepRows(frame, body, work, openings, out, slot.claim, driver))

    def _choose_codec(self, route: StageRoute, rows: int, width: int) -> Codec:
        rate = self._links.bytes_per_s(route.next)
        return find_codec(choose_codec(route.wire, rows, width, bytes_per_s=rate))


def _send_nothing() -> None:
    """A replay restores memory; nobody waits for it."""
