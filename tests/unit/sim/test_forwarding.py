"""The switch without devices: when packets arrive, which are dropped, and that none overtakes another."""

from __future__ import annotations

import random

import pytest

from shardcompute.sim import Change, Conditions, apply_change, initial_conditions, ring_topology
from shardcompute.sim.forwarding import Forwarding

# 10 ms from machine to machine; a packet of 1,250 bytes takes 1 ms of 10 Mbit/s.
CONDITIONS = initial_conditions(ring_topology(4, 40, 10), ["a", "b", "c", "d"])
PACKET = bytes(1250)


def forwarding(conditions: Conditions = CONDITIONS) -> Forwarding:
    return Forwarding(conditions, random.Random(1))


def arrivals(switch: Forwarding, until_s: float) -> list[tuple[float, int, bytes]]:
    """Everything that arrives, with its time."""
    seen = []
    while (next_s := switch.next_s()) is not None and next_s <= until_s:
        seen += [(next_s, target, packet) for target, packet in switch.release(next_s)]
    return seen


def test_rate_and_delay() -> None:
    switch = forwarding()
    for _ in range(3):
        switch.take(0, 1, PACKET, 5.0)
    times = [when for when, _, _ in arrivals(switch, 9.0)]
    assert times == pytest.approx([5.011, 5.012, 5.013])
    assert switch.release(9.0) == []


def test_uplinks_are_shared_and_of_each_machine() -> None:
    switch = forwarding()
    switch.take(0, 1, PACKET, 0.0)
    switch.take(0, 2, PACKET, 0.0)
    switch.take(3, 2, b"other", 0.0)
    times = {(target, len(packet)): when for when, target, packet in arrivals(switch, 1.0)}
    assert times[1, 1250] == pytest.approx(0.011)
    assert times[2, 1250] == pytest.approx(0.012), "it waited for the packet before"
    assert times[2, 5] == pytest.approx(0.010, abs=1e-4)


def test_downlinks_hold_back_what_comes_at_once() -> None:
    conditions = apply_change(CONDITIONS, Change(machines=("d",), downlink_mbit=5))
    switch = forwarding(conditions)
    for source in range(3):
        switch.take(source, 3, PACKET, 0.0)
    times = [when for when, _, _ in arrivals(switch, 1.0)]
    assert times == pytest.approx([0.011, 0.013, 0.015])


def test_full_queue_drops() -> None:
    switch = forwarding(apply_change(CONDITIONS, Change(queue_ms=5)))
    for _ in range(20):
        switch.take(0, 1, PACKET, 0.0)
    # One is on the line, five wait for 1 ms each, and the one that finds exactly 5 ms before it still fits.
    assert switch.counts.overflowed == 20 - len(arrivals(switch, 1.0))
    assert 5 <= switch.counts.delivered <= 7


def test_jitter_keeps_order() -> None:
    switch = forwarding(apply_change(CONDITIONS, Change(jitter_ms=50)))
    for number in range(200):
        switch.take(0, 1, number.to_bytes(2, "big"), number * 0.001)
    seen = arrivals(switch, 9.0)
    assert [int.from_bytes(packet, "big") for _, _, packet in seen] == list(range(200))
    delays = [when - number * 0.001 for number, (when, _, _) in enumerate(seen)]
    assert max(delays) - min(delays) > 0.02


def test_loss_is_by_chance() -> None:
    switch = forwarding(apply_change(CONDITIONS, Change(loss=0.1)))
    for number in range(2000):
        switch.take(0, 1, b"x", number * 0.001)
    assert 140 < switch.counts.lost < 260
    assert len(arrivals(switch, 99.0)) == 2000 - switch.counts.lost


def test_cut_paths_drop_what_comes_and_deliver_what_was_under_way() -> None:
    switch = forwarding()
    switch.take(0, 1, b"before", 0.0)
    switch.reconfigure(apply_change(CONDITIONS, Change(between=("a", "b"), is_cut=True)), 0.001)
    switch.take(0, 1, b"during", 0.002)
    switch.take(0, 2, b"elsewhere", 0.002)
    switch.reconfigure(CONDITIONS, 0.003)
    switch.take(0, 1, b"after", 0.004)
    assert [packet for _, _, packet in arrivals(switch, 1.0)] == [b"before", b"elsewhere", b"after"]
    assert switch.counts.refused == 1


def test_collapsed_line_slows_what_waits() -> None:
    switch = forwarding()
    switch.take(0, 1, PACKET, 0.0)
    switch.take(0, 1, PACKET, 0.0)
    switch.reconfigure(apply_change(CONDITIONS, Change(machines=("a",), uplink_mbit=1)), 0.0)
    switch.take(0, 1, PACKET, 0.0)
    last = arrivals(switch, 9.0)[-1][0]
    assert last == pytest.approx(0.010 + 3 * 0.010)
