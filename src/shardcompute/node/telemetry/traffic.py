"""Traffic counters: what stages have done and what has gone over the links between them, as reported with each step.

A stage may be broken or lie about names, so there is a bound to how many are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

from shardcompute.node.service import HopTraffic, StageWork
from shardcompute.wire import CODECS, StageTiming

_MOST_HOPS = 4096
_MOST_STAGES = 4096


class WireTraffic:
    """Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._work: dict[tuple[str, str], StageWork] = {}

    def count(self, step: Sequence[StageTiming], chain: str = "") -> None:
        """One step's way along a chain, stage by stage."""
        with self._lock:
            for stage in step:
                place = (chain, stage.node)
                if place in self._work or len(self._work) < _MOST_STAGES:
                    known = self._work.get(place, StageWork(*place, 0, 0.0, 0.0, 0.0))
                    self._work[place] = StageWork(
                        *place,
                        known.steps + 1,
                        known.queue_s + max(0.0, stage.queue_s),
                        known.compute_s + max(0.0, stage.compute_s),
                        known.codec_s + max(0.0, stage.codec_s),
                        known.exchange_s + max(0.0, stage.exchange_s),
                        stage.slowest,
                    )
            for sender, receiver in pairwise(step):
                hop = (sender.node, receiver.node, sender.codec)
                is_known = hop in self._sums
                if sender.codec in CODECS and (is_known or len(self._sums) < _MOST_HOPS):
                    frames, size_bytes = self._sums.get(hop, (0, 0))
                    self._sums[hop] = (frames + 1, size_bytes + sender.sent_bytes)

    def hops(self) -> tuple[HopTraffic, ...]:
        with self._lock:
            return tuple(HopTraffic(*hop, *sums) for hop, sums in sorted(self._sums.items()))

    def stages(self) -> tuple[StageWork, ...]:
        with self._lock:
            return tuple(self._work[place] for place in sorted(self._work))
