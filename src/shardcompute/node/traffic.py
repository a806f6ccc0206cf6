"""What has gone over the links between stages so far, by codec, as the stages themselves report it with each step.

A stage may be broken or lie about names, so there is a bound to how many are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

from shardcompute.node.service import HopTraffic
from shardcompute.wire import CODECS, StageTiming

_MOST_HOPS = 4096


class WireTraffic:
    """Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str, str], tuple[int, int]] = {}

    def count(self, step: Sequence[StageTiming]) -> None:
        """One step's way along a chain, stage by stage."""
        with self._lock:
            for sender, receiver in pairwise(step):
                hop = (sender.node, receiver.node, sender.codec)
                is_known = hop in self._sums
                if sender.codec in CODECS and (is_known or len(self._sums) < _MOST_HOPS):
                    frames, size_bytes = self._sums.get(hop, (0, 0))
                    self._sums[hop] = (frames + 1, size_bytes + sender.sent_bytes)

    def hops(self) -> tuple[HopTraffic, ...]:
        with self._lock:
            return tuple(HopTraffic(*hop, *sums) for hop, sums in sorted(self._sums.items()))
