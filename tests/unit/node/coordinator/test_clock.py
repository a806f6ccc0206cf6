"""A clock that does not count the time in which its owner was held up."""

from __future__ import annotations

from shardcompute.node.coordinator.clock import SteadyClock


class Hand:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_passes_as_it_does_elsewhere() -> None:
    hand = Hand()
    clock = SteadyClock(hand, most_s=0.5)
    for _ in range(10):
        hand.now_s += 0.5
        assert clock.turn() == 0.0
    assert clock() == 105.0


def test_what_was_slept_through_does_not_count() -> None:
    hand = Hand()
    clock = SteadyClock(hand, most_s=0.5)
    hand.now_s += 60.0
    assert clock() == 160.0, "nobody has noticed yet"
    assert clock.turn() == 59.5
    assert clock() == 100.5
    hand.now_s += 0.25
    assert clock.turn() == 0.0
    assert clock() == 100.75


def test_time_never_goes_back_between_turns() -> None:
    hand = Hand()
    clock = SteadyClock(hand, most_s=0.5)
    seen = []
    for step_s in (0.1, 0.5, 3.0, 0.0, 0.4, 100.0):
        hand.now_s += step_s
        clock.turn()
        seen.append(clock())
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] < 3.0
