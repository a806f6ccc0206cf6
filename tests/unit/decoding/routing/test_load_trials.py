"""Trials under load, with rates that are given. All times simulated."""

from __future__ import annotations

import pytest

from shardcompute.decoding.routing.load_trials import LoadTrials

RING_S = 0.1


class Load:
    """Sessions that get so many tokens a second with drafts, and so many without."""

    def __init__(self, with_drafts: float, plain: float, *, can_draft: bool = True) -> None:
        self.trials = LoadTrials()
        self.rates = {True: with_drafts, False: plain}
        self.can_draft = can_draft
        self.now_s = 0.0

    def run(self, seconds: float, sessions: int = 8) -> float:
        """The share of the time in which drafts were sent."""
        end_s, steps, drafting = self.now_s + seconds, 0, 0
        while self.now_s < end_s:
            drafts = self.trials.drafts(sessions)
            if drafts and self.can_draft:
                self.trials.drafted()
            self.now_s += 8 / self.rates[drafts]
            self.trials.came(8, sessions, RING_S, self.now_s)
            steps += 1
            drafting += drafts
        return drafting / steps


@pytest.mark.parametrize(("with_drafts", "plain", "least", "most"), [(60, 75, 0.0, 0.1), (80, 60, 0.9, 1.0)])
def test_what_was_faster_is_done(with_drafts: float, plain: float, least: float, most: float) -> None:
    load = Load(with_drafts, plain)
    load.run(20)
    assert least <= load.run(200) <= most


def test_what_was_slower_is_tried_again() -> None:
    load = Load(60, 75)
    load.run(30)
    load.rates[True] = 120
    load.run(200)
    assert load.run(60) > 0.9


def test_one_session_is_left_alone() -> None:
    load = Load(60, 75)
    assert load.run(60, sessions=1) == 1.0


def test_other_loads_are_judged_by_themselves() -> None:
    load = Load(60, 75)
    load.run(60, sessions=8)
    load.rates = {True: 50, False: 30}
    load.run(30, sessions=2)
    assert load.run(60, sessions=2) > 0.9
    load.rates = {True: 60, False: 75}
    assert load.run(60, sessions=8) < 0.1


def test_without_anything_to_draft_nothing_is_tried() -> None:
    assert Load(70, 70, can_draft=False).run(60) == 1.0


def test_a_pause_counts_for_nobody() -> None:
    load = Load(60, 75)
    for _ in range(40):
        load.run(0.9)
        load.now_s += 10
    assert load.trials.drafts(8), "no window was whole"
