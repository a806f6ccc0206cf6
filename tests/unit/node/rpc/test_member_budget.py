"""How much each member may say."""

from __future__ import annotations

from shardcompute.node.rpc.member_budget import MemberBudget


class Hand:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_then_a_steady_rate() -> None:
    clock = Hand()
    budget = MemberBudget(clock, burst_bytes=1000, bytes_per_s=100)
    assert budget.spend("a", 900)
    assert not budget.spend("a", 200), "not even a part of it"
    assert budget.spend("a", 100)
    assert not budget.spend("a", 1)
    clock.now_s += 2.0
    assert budget.spend("a", 200)
    assert not budget.spend("a", 1)


def test_nobody_pays_for_others() -> None:
    budget = MemberBudget(Hand(), burst_bytes=1000, bytes_per_s=100)
    assert budget.spend("a", 1000)
    assert not budget.spend("a", 1)
    assert budget.spend("b", 1000)


def test_silence_is_not_saved_up_for_ever() -> None:
    clock = Hand()
    budget = MemberBudget(clock, burst_bytes=1000, bytes_per_s=100)
    assert budget.spend("a", 1)
    clock.now_s += 1e6
    assert not budget.spend("a", 1001)
    assert budget.spend("a", 1000)


def test_few_are_remembered() -> None:
    budget = MemberBudget(Hand(), burst_bytes=10, bytes_per_s=0)
    for number in range(20_000):
        assert budget.spend(str(number), 10)
    assert len(budget._left) <= 4096
