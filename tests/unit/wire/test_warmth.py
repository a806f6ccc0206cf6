"""What goes over a link while there is nothing to send, and that frames never wait for it."""

from __future__ import annotations

import threading

import pytest

from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, InprocTransport, LinkPump, Message, Ping
from shardcompute.wire.control import TensorBytes
from shardcompute.wire.warmth import Warmth, WarmthPolicy, choose_warmth

PATIENCE_S = 10.0


def test_near_links_are_left_alone() -> None:
    assert choose_warmth(0.005, "cubic") is None


@pytest.mark.parametrize(("congestion", "pings"), [("bbr", False), ("cubic", True), (None, True)])
def test_far_links_are_padded_and_pinged_where_needed(congestion: str | None, pings: bool) -> None:
    policy = choose_warmth(0.25, congestion)
    assert policy is not None
    assert policy.opening_bytes >= 500_000
    assert (policy.ping_interval_s is not None) is pings


def test_opening_comes_first_then_pings_until_it_lingers_no_more() -> None:
    warmth = Warmth(WarmthPolicy(opening_bytes=100_000, ping_interval_s=0.1, linger_s=1.0), 0.0)
    opening = []
    while warmth.wait_s(0.0) == 0.0:
        opening.append(warmth.padding(0.0))
    assert 100_000 <= sum(len(part) for _, body in opening for part in body) < 200_000
    assert warmth.wait_s(0.04) == pytest.approx(0.06)
    assert isinstance(warmth.padding(0.1)[0], Ping)
    assert warmth.wait_s(0.1) == pytest.approx(0.1)
    assert warmth.wait_s(1.5) is None
    warmth.used(2.0)
    assert warmth.wait_s(2.0) == pytest.approx(0.1)


def test_without_pings_nothing_follows_the_opening() -> None:
    warmth = Warmth(WarmthPolicy(opening_bytes=0), 0.0)
    assert warmth.wait_s(0.0) is None


def hello(node: str) -> Hello:
    return Hello(VERSION_MIN, VERSION_MAX, node, "stage", "home")


def test_a_pump_pads_counts_frames_only_and_keeps_sending() -> None:
    transport = InprocTransport()
    seen: list[Message] = []
    counted: list[int] = []
    is_there = threading.Condition()

    def take(message: Message, body: memoryview) -> None:
        with is_there:
            seen.append(message)
            is_there.notify_all()

    with transport.listen("inproc://b", hello("b")) as listener:
        near = transport.dial("inproc://b", hello("a"))
        far = listener.accept(PATIENCE_S)
        policy = WarmthPolicy(opening_bytes=200_000, ping_interval_s=0.01)
        with (
            LinkPump(far, take, lambda error: None),
            LinkPump(
                near,
                lambda message, body: None,
                lambda error: None,
                on_sent=lambda size, seconds: counted.append(size),
                warmth=policy,
            ) as pump,
            is_there,
        ):
            assert is_there.wait_for(lambda: any(isinstance(m, Ping) for m in seen), PATIENCE_S)
            assert pump.offer(TensorBytes(77, 3), (memoryview(b"abc"),))
            assert is_there.wait_for(lambda: TensorBytes(77, 3) in seen, PATIENCE_S)
    assert sum(m.size for m in seen if isinstance(m, TensorBytes) and m.number != 77) >= 200_000
    assert counted == [3]
