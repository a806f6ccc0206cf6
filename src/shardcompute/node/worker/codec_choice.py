"""Codec choice for frames that go out: by their sender, from the link, the frame's size and what may be lost.

A cluster's wire is `exact` (the default: the same tokens wherever the model is cut), the name of a codec, or `auto`.
With `auto` each frame gets the codec with which it arrives soonest among those that both ends know and whose
measured loss is within `QUALITY_BOUND`; it stays exact where that saves less than a tenth of the hop, as for small
frames on fast links, and where nobody knows what the link carries. So `auto` promises quality but, unlike a named
codec, not that the same request gives the same tokens twice: what is chosen depends on what else is in the frame.
A codec that the next stage has not announced is never sent to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardcompute.node.rpc.commands import Wire
from shardcompute.wire import CODECS
from shardcompute.wire.codecs.mode import AUTO, EXACT

QUALITY_BOUND = 5e-3
"""The most that `auto` may lose: mean KL divergence (nats a token) from the exact chain, measured over five cuts. About
as much as the same model loses with its weights in int8."""
_WORTHWHILE = 0.1
_LEAST_BYTES = 1 << 16
_LEAST_WAIT_S = 0.02
_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a codec costs and saves: `kl` as measured by `bench codecs` on SmolLM2-135M with native weights and five
    cuts, how much of its longest body is left on the average, and the time to encode and decode a frame and each of
    its values.

    Kernels that round activations to 8 bits, as those for native weights do, answer any change with other roundings:
    that alone is 0.0037 of each `kl`. With float32 weights it is 0.00005 for bf16 and 0.0003 for int8-outliers.
    """

    kl: float
    share: float
    frame_s: float
    value_s: float


EXPECTED: Mapping[str, Expectation] = MappingProxyType(
    {
        "exact": Expectation(0.0, 1.0, 0.0, 0.0),
        "exact+deflate": Expectation(0.0, 0.84, 20e-6, 11e-9),
        "bf16": Expectation(3.9e-3, 1.0, 10e-6, 0.7e-9),
        "bf16+deflate": Expectation(3.9e-3, 0.68, 30e-6, 11e-9),
        "fp16": Expectation(3.7e-3, 1.0, 10e-6, 4.3e-9),
        "int8": Expectation(13.6e-3, 1.0, 30e-6, 2e-9),
        "int8+deflate": Expectation(13.6e-3, 0.86, 40e-6, 14e-9),
        "int8-outliers": Expectation(4.3e-3, 1.0, 80e-6, 5e-9),
        "int8-outliers+deflate": Expectation(4.3e-3, 0.89, 90e-6, 17e-9),
        "fp8": Expectation(10.6e-3, 1.0, 20e-6, 5e-9),
    }
)


def choose_codec(
    wire: Wire, rows: int, width: int, *, bytes_per_s: float | None = None, bound: float = QUALITY_BOUND
) -> str:
    """The codec for a frame of this size; `bytes_per_s` is newer than what was told of the link."""
    known = [name for name in CODECS if name in wire.codecs]
    if wire.mode != AUTO:
        return wire.mode if wire.mode in known else EXACT
    rate = bytes_per_s or wire.bytes_per_s
    if rate <= 0:
        return EXACT
    allowed = [name for name in known if EXPECTED[name].kl <= bound]
    times_s = {name: _arrival_s(name, rows, width, wire.rtt_s, rate) for name in {EXACT, *allowed}}
    # Of two that take as long, the one that loses less.
    best = min(times_s, key=lambda name: (times_s[name], EXPECTED[name].kl))
    is_worthwhile = times_s[EXACT] - times_s[best] >= _WORTHWHILE * times_s[EXACT]
    return best if is_worthwhile else EXACT


def _arrival_s(name: str, rows: int, width: int, rtt_s: float, bytes_per_s: float) -> float:
    expected = EXPECTED[name]
    body_bytes = expected.share * CODECS[name].body_bytes(rows, width)
    coding_s = expected.frame_s + expected.value_s * rows * width
    return rtt_s / 2 + body_bytes / bytes_per_s + coding_s


class LinkPace:
    """How much a link carries, as its sender sees it. Only sends that had to wait say anything: whatever fits into
    the system's buffers is taken at once, however slowly it travels on."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None

    def saw(self, size_bytes: int, seconds: float) -> None:
        if size_bytes < _LEAST_BYTES or seconds < _LEAST_WAIT_S:
            return
        rate = size_bytes / seconds
        known = self.bytes_per_s
        self.bytes_per_s = rate if known is None else known + _WEIGHT * (rate - known)
