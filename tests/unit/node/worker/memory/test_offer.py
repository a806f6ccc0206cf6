"""A lowered offer rises by what has been free for a while, and ever more rarely where that proves wrong."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from shardcompute.node.worker.memory.offer import MemoryOffer, RecoveryPolicy
from shardcompute.node.worker.memory.recovery import OfferRecovery

POLICY = RecoveryPolicy(first_wait_s=60.0, most_wait_s=600.0, samples=4, least_rise=0.1)
FULL = 1000
PATIENCE_S = 20.0


class Clocked:
    """An offer with its clock, and a device that says what is free."""

    def __init__(self, free: Callable[[float], int | None], policy: RecoveryPolicy = POLICY) -> None:
        self.offer = MemoryOffer(FULL, policy)
        self.now_s = 0.0
        self.rises: list[tuple[float, int]] = []
        self._free = free

    def run_out(self, size_bytes: int) -> int:
        shortages = self.offer.count_shortage(self.now_s)
        self.offer.lower(size_bytes)
        return shortages

    def run_until(self, until_s: float) -> None:
        while (wait_s := self.offer.measure_in_s(self.now_s)) is not None and self.now_s + wait_s <= until_s:
            self.now_s += wait_s
            if self.offer.measured(self._free(self.now_s), self.now_s):
                self.rises.append((self.now_s, self.offer.size_bytes))
        self.now_s = until_s


def test_nothing_is_measured_while_all_is_offered() -> None:
    assert MemoryOffer(FULL, POLICY).measure_in_s(0.0) is None


def test_memory_that_was_free_all_the_time_is_offered_again() -> None:
    device = Clocked(lambda now_s: 5 * FULL)
    device.run_out(400)
    device.run_until(59.0)
    assert (device.rises, device.offer.size_bytes) == ([], 400), "not before it has been free for a while"
    device.run_until(3600.0)
    assert device.rises == [(60.0, FULL)]
    assert device.offer.is_full
    assert device.offer.measure_in_s(device.now_s) is None


def test_as_much_is_offered_as_was_free_at_worst() -> None:
    device = Clocked(lambda now_s: 700 if now_s == 45.0 else 900)
    device.run_out(400)
    device.run_until(60.0)
    assert device.offer.size_bytes == 700
    device.run_until(120.0)
    assert device.offer.size_bytes == 900
    device.run_until(36_000.0)
    assert len(device.rises) == 2


def test_a_little_more_is_no_news_unless_it_is_all() -> None:
    device = Clocked(lambda now_s: 499)
    device.run_out(400)
    device.run_until(36_000.0)
    assert device.rises == []
    device = Clocked(lambda now_s: FULL)
    device.run_out(950)
    device.run_until(60.0)
    assert device.rises == [(60.0, FULL)]


def test_a_device_that_flaps_moves_nothing() -> None:
    """Every other time something else has the memory."""
    device = Clocked(lambda now_s: FULL if int(now_s / 15.0) % 2 else 350)
    device.run_out(400)
    device.run_until(86_400.0)
    assert device.rises == []
    assert device.offer.size_bytes == 400


def test_a_device_that_lies_is_tried_ever_more_rarely() -> None:
    """It always says that all is free, and all runs out as soon as it is used."""
    device = Clocked(lambda now_s: FULL)
    for _ in range(8):
        device.run_out(400)
        tried = len(device.rises)
        while len(device.rises) == tried:
            device.run_until(device.now_s + 1.0)
    at = [0.0, *(now_s for now_s, _ in device.rises)]
    waits = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert waits == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0, 600.0, 600.0]


def test_a_day_without_a_shortage_forgets_those_before() -> None:
    device = Clocked(lambda now_s: FULL)
    assert [device.run_out(400) for _ in range(3)] == [1, 2, 3]
    device.run_until(POLICY.forgotten_after_s)
    assert device.run_out(400) == 1
    device.run_until(device.now_s + 60.0)
    assert device.offer.is_full


@pytest.mark.parametrize("said", [None, -5, 0])
def test_a_device_that_says_nothing_of_use_is_not_trusted(said: int | None) -> None:
    device = Clocked(lambda now_s: said if int(now_s / 15.0) % 3 == 0 else FULL)
    device.run_out(400)
    device.run_until(86_400.0)
    assert device.rises == []


class _Recovering:
    """An offer that is due at once, and full after so many measurements."""

    def __init__(self, measurements: int) -> None:
        self.left = measurements
        self.heard: list[int | None] = []

    def measure_in_s(self) -> float | None:
        return 0.0 if self.left > 0 else None

    def measured(self, spare_bytes: int | None) -> bool:
        self.heard.append(spare_bytes)
        self.left -= 1
        return self.left == 0


def test_it_is_measured_until_all_is_offered_and_whenever_it_is_lowered_again() -> None:
    offer, raised = _Recovering(3), threading.Semaphore(0)
    recovery = OfferRecovery(offer, lambda: 7, raised.release)
    for shortage in (1, 2):
        recovery.begin()
        recovery.begin()
        assert raised.acquire(timeout=PATIENCE_S)
        assert offer.heard == [7] * 3 * shortage
        offer.left = 3


def test_a_driver_that_fails_leaves_the_offer_as_it_is() -> None:
    offer, raised = _Recovering(2), threading.Event()

    def fail() -> int:
        raise RuntimeError("CUDA error: unspecified launch failure")

    OfferRecovery(offer, fail, raised.set).begin()
    assert raised.wait(PATIENCE_S)
    assert offer.heard == [None, None]


def test_closing_ends_the_wait() -> None:
    class _Late(_Recovering):
        def measure_in_s(self) -> float | None:
            asked.set()
            return 3600.0

    offer, asked = _Late(1), threading.Event()
    recovery = OfferRecovery(offer, lambda: 7, lambda: None)
    recovery.begin()
    assert asked.wait(PATIENCE_S)
    [thread] = [each for each in threading.enumerate() if each.name == "memory offer"]
    recovery.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert offer.heard == []
