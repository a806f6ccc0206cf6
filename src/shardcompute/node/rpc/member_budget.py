"""Rate limit of what each member may tell the coordinator: a bucket of bytes for every node, which fills up again.

What members say is applied, journalled and shown. An honest one says a few hundred bytes a second; one that says
more than its bucket holds is cut off, and has to describe itself anew once it may speak again. So nothing true is
lost, and nobody makes the journal or the coordinator's queue grow at will.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

BURST_BYTES = 1 << 20
BYTES_PER_S = 16 << 10
MESSAGE_BYTES = 128
"""What a message costs besides its content."""
REGISTRATION_BYTES = 4096
SIGNATURE_BYTES = 1 << 14
"""A certificate is signed rarely, and costs more than it says."""
_MOST_NODES = 4096


class MemberBudget:
    """May be used from any thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        burst_bytes: float = BURST_BYTES,
        bytes_per_s: float = BYTES_PER_S,
    ) -> None:
        self._clock = clock
        self._burst_bytes = burst_bytes
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By node, how much it may say and when that was so."""

    def spend(self, node: str, size_bytes: int) -> bool:
        """Whether this node may say so much now."""
        now_s = self._clock()
        with self._lock:
            left, then_s = self._left.pop(node, (self._burst_bytes, now_s))
            left = min(self._burst_bytes, left + (now_s - then_s) * self._bytes_per_s)
            may_speak = size_bytes <= left
            self._left[node] = (left - size_bytes if may_speak else left, now_s)
            while len(self._left) > _MOST_NODES:
                self._left.popitem(last=False)
        return may_speak
