"""What is claimed of a link that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace, TracebackType

import pytest

from shardcompute.node.rpc import link_probe
from shardcompute.node.rpc.link_probe import bandwidth, probe_link
from shardcompute.wire import Message, Pong
from shardcompute.wire.control import TensorBytes

MIB = 1 << 20


def test_bandwidth_leaves_the_round_trip_out() -> None:
    assert bandwidth(MIB, 0.110, 0.010) == pytest.approx(MIB / 0.1)


@pytest.mark.parametrize("sent_s", [2e-4, 3e-4, 0.08])
def test_a_load_as_quick_as_a_ping_is_no_proof_of_endless_bandwidth(sent_s: float) -> None:
    assert bandwidth(MIB, sent_s, 3e-4 if sent_s < 0.01 else 0.09) <= 8 * MIB / sent_s


class TimedLine:
    """A line of so many bytes a second, on a clock of its own."""

    peer = "far"
    stats = SimpleNamespace(rung="direct", remark="")

    def __init__(self, bytes_per_s: float) -> None:
        self.now_s = 0.0
        self.loads: list[int] = []
        self._bytes_per_s = bytes_per_s

    def __enter__(self) -> TimedLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def send(self, message: Message, body: Sequence[memoryview] = ()) -> None:
        self.now_s += 0.01
        if isinstance(message, TensorBytes):
            self.loads.append(message.size)
            self.now_s += message.size / self._bytes_per_s

    def receive(self, timeout_s: float) -> tuple[Message, memoryview]:
        return Pong(0, 0.0), memoryview(b"")


@pytest.mark.parametrize("bytes_per_s", [1e5, 1e7])
def test_a_thin_line_is_known_by_little(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    """A whole MiB would take it for seconds from those whom it serves."""
    line = TimedLine(bytes_per_s)
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: line.now_s)
    quality = probe_link(lambda: line)  # type: ignore[arg-type, return-value]
    assert quality.bytes_per_s == pytest.approx(bytes_per_s)
    assert quality.rtt_s == pytest.approx(0.01)
    assert (MIB in line.loads) is (bytes_per_s > 1e6)
