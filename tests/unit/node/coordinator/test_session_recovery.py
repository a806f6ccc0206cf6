"""What a new shape can go on with: never more than every stage knows."""

from __future__ import annotations

import pytest

from shardcompute.control.actions import StageAddress
from shardcompute.control.state import Assignment
from shardcompute.node.coordinator.session_recovery import RecoveryPlan, plan_recovery
from shardcompute.node.rpc.commands import Connected
from shardcompute.node.rpc.session_ids import Resumption


def before(*nodes: str) -> list[Assignment]:
    return [Assignment(node, 2 * index, 2 * index + 2) for index, node in enumerate(nodes)]


def after(*nodes: str) -> list[StageAddress]:
    return [StageAddress(s.node, f"tcp://{s.node}", s.start, s.stop) for s in before(*nodes)]


@pytest.mark.parametrize(
    ("nodes", "new"),
    [("abc", set()), ("xbc", {0}), ("axc", {1}), ("abx", {2}), ("xby", {0, 2}), ("cba", {0, 2})],
)
def test_machines_that_stayed_go_on(nodes: str, new: set[int]) -> None:
    assert plan_recovery(before(*"abc"), after(*nodes)) == RecoveryPlan(frozenset(new))


@pytest.mark.parametrize("nodes", ["xyc", "axy", "xyz", "ab", "abcd"])
def test_two_new_ones_side_by_side_or_another_cut_cannot_be_told(nodes: str) -> None:
    assert plan_recovery(before(*"abc"), after(*nodes)) is None


def test_nothing_was_in_use() -> None:
    assert plan_recovery([], after("a")) is None


def test_a_session_goes_on_as_far_as_all_know_it() -> None:
    plan = RecoveryPlan(frozenset({1}))
    answers = [
        Connected(kept=True, held={1: 9, 2: 5, 3: 4}, replayed={1: 8, 2: 5}),
        Connected(held={}),
        Connected(kept=True, held={1: 9, 2: 4, 3: 4}),
    ]
    assert plan.resumption(answers) == Resumption({1: 8, 2: 4}, held=frozenset({1, 2, 3}))


def test_a_new_first_stage_is_told_by_the_driver() -> None:
    plan = RecoveryPlan(frozenset({0}))
    resumption = plan.resumption([Connected(), Connected(kept=True, held={1: 3})])
    assert (resumption.lengths, resumption.has_new_first) == ({1: 3}, True)


def test_who_lost_its_sessions_after_all_knows_none() -> None:
    answers = [Connected(kept=False, held={1: 3}), Connected(kept=True, held={1: 3})]
    assert RecoveryPlan(frozenset()).resumption(answers).lengths == {}
