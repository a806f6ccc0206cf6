"""Keeping a link's congestion window open, so that a long frame after a pause does not begin slowly again.

A connection's window starts at about 14 kB and opens by one round trip's worth a round trip; at 80 ms and 100 Mbit/s a
prefill chunk of 500 kB takes 530 ms over a new connection and 130 ms over one that has carried as much before. So a
link to a machine that is far away is padded once, when it is opened. A window then stays open with `bbr`, whatever
the pauses; other congestion controls close it after a pause of about 0.3 s, which small pings avoid.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardcompute.wire.control import TensorBytes
from shardcompute.wire.framing import Body
from shardcompute.wire.messages import Message, Ping

_FAR_S = 0.03
_PATIENT = ("bbr",)
# Less than the least retransmission timeout, after which a window counts as unused.
_PING_INTERVAL_S = 0.1
_PIECE_BYTES = 1 << 16
_PIECE = memoryview(bytes(_PIECE_BYTES))


@dataclass(frozen=True, slots=True)
class WarmthPolicy:
    """How much to send into a new link, and how often into one that has been idle for less than `linger_s`.

    `ping_interval_s` None: never. Whoever receives must not mind `TensorBytes` and `Ping`.
    """

    opening_bytes: int = 1 << 19
    ping_interval_s: float | None = None
    linger_s: float = 30.0


def choose_warmth(opening_s: float, congestion: str | None) -> WarmthPolicy | None:
    """For a link that took so long to open: about three round trips. None: it is near enough."""
    if opening_s < _FAR_S:
        return None
    return WarmthPolicy(ping_interval_s=None if congestion in _PATIENT else _PING_INTERVAL_S)


class Warmth:
    """What to send on one link while there is nothing to send. For its sending thread alone."""

    def __init__(self, policy: WarmthPolicy, now_s: float) -> None:
        self._policy = policy
        self._left_bytes = policy.opening_bytes
        self._used_s = self._sent_s = now_s
        self._number = 0

    def used(self, now_s: float) -> None:
        """A frame of somebody's went out."""
        self._used_s = self._sent_s = now_s

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait for a frame before `padding` is due; None: as long as it takes."""
        if self._left_bytes > 0:
            return 0.0
        interval_s = self._policy.ping_interval_s
        if interval_s is None or now_s - self._used_s > self._policy.linger_s:
            return None
        return max(0.0, self._sent_s + interval_s - now_s)

    def padding(self, now_s: float) -> tuple[Message, Body]:
        """What goes out instead of nothing."""
        self._sent_s = now_s
        self._number += 1
        if self._left_bytes > 0:
            self._left_bytes -= _PIECE_BYTES
            return TensorBytes(self._number, _PIECE_BYTES), (_PIECE,)
        return Ping(self._number, now_s), ()
