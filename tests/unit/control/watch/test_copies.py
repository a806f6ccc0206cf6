"""Copies of a model come and go with demand: within limits, calmly, and never under an answer."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shardcompute.control import PlacementPolicy, memorable
from shardcompute.control import events as happened
from shardcompute.control.placement.parallelism import Parallelism
from support.swarm.noisy_cluster import MIB, SMALL, Machine, NoisyCluster

MOST = 3


class AskedCluster(NoisyCluster):
    """Machines that each hold the whole model, and clients who ask: each answer stays where it began."""

    def __init__(self, seed: int = 0, most: int = MOST, machines: str = "abcd") -> None:
        policy = PlacementPolicy(most_chains=most)
        held = {name: Machine(memory_bytes=500 * MIB) for name in machines}
        super().__init__(held, seed=seed, noise=0.0, policy=policy)
        self.answers: Counter[str] = Counter()
        self.wanted: list[happened.CopiesWanted] = []
        self.lost_answers = 0
        self.request(parallel=Parallelism(pp=1))
        self.run(120, 5)

    @property
    def copies(self) -> int:
        return len(self.state.live_chains())

    def ask(self, total: int) -> None:
        """So many answers are under way from now on: of too many the oldest copies' end first."""
        ready = [chain.id for chain in self.state.live_chains() if chain.status == "ready"]
        taking = [id for id in ready if id != self.state.models[SMALL.name].leaving_chain] or ready
        while sum(self.answers.values()) < total:
            self.answers[min(taking, key=lambda id: self.answers[id])] += 1
        while sum(self.answers.values()) > total:
            self.answers[max(self.answers, key=lambda id: self.answers[id])] -= 1

    def serve_asked(self, seconds: int, total: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.ask(total)
            self.tell(happened.DemandSeen(SMALL.name, dict(self.answers), self.now_s))
            before = self.state.models[SMALL.name]
            self.turn()
            after = self.state.models[SMALL.name]
            if after.copies_s != before.copies_s:
                reason = after.copies_reason
                self.wanted.append(
                    happened.CopiesWanted(
                        SMALL.name, after.extra_chains, after.leaving_chain, reason, self.now_s
                    )
                )
            live = {chain.id for chain in self.state.live_chains()}
            for id in [id for id in self.answers if id not in live]:
                self.lost_answers += self.answers.pop(id)


def test_a_crowd_that_lasts_brings_copies_and_its_absence_takes_them_away() -> None:
    cluster = AskedCluster()
    assert cluster.copies == 1
    cluster.serve_asked(10, 20)
    assert cluster.copies == 1, "a crowd of a moment"
    cluster.serve_asked(120, 20)
    assert cluster.copies == 3, "each serves eight well"
    cluster.serve_asked(240, 4)
    assert cluster.copies == 3, "they may be back"
    cluster.serve_asked(900, 4)
    assert cluster.copies == 1
    assert cluster.lost_answers == 0
    told = [each.reason for each in cluster.wanted]
    assert (
        told[0] == "20 answers run or wait, more than 8 for each copy: one more, which makes 2 of at most 3"
    )
    assert any("takes nobody new" in each for each in told)
    assert any("has given its last answer and is dropped" in each for each in told)


def test_no_more_copies_than_allowed_nor_than_there_are_machines_for() -> None:
    bounded, small = AskedCluster(most=2), AskedCluster(machines="a")
    bounded.serve_asked(400, 200)
    assert bounded.copies == 2
    small.serve_asked(400, 200)
    assert small.copies == 1, "on the same machine another copy would bring nothing"
    assert small.wanted == []


def test_without_the_option_nothing_is_added() -> None:
    cluster = AskedCluster(most=0)
    cluster.serve_asked(400, 200)
    assert cluster.copies == 1
    assert cluster.wanted == []


def test_a_copy_that_takes_nobody_new_stays_where_it_is_needed_after_all() -> None:
    cluster = AskedCluster()
    cluster.serve_asked(100, 12)
    assert cluster.copies == 2
    # On both of them are answers that do not end.
    cluster.answers = Counter({chain.id: 2 for chain in cluster.state.live_chains()})
    while not cluster.state.models[SMALL.name].leaving_chain:
        cluster.serve_asked(1, 4)
        assert cluster.now_s < 2000
    leaving = cluster.state.models[SMALL.name].leaving_chain
    cluster.serve_asked(60, 4)
    assert leaving in {chain.id for chain in cluster.state.live_chains()}
    cluster.serve_asked(40, 30)
    assert cluster.state.models[SMALL.name].leaving_chain == ""
    assert cluster.copies >= 2
    assert any(each.reason.endswith(f"{leaving} is needed after all") for each in cluster.wanted)


@pytest.mark.parametrize("seed", range(3))
def test_random_load_never_breaks_a_limit_and_never_ends_an_answer(seed: int) -> None:
    cluster, chance = AskedCluster(seed), random.Random(seed)
    for _ in range(25):
        cluster.serve_asked(chance.choice((5, 20, 60, 400)), chance.choice((0, 1, 6, 9, 14, 18, 40)))
        assert 1 <= cluster.copies <= MOST
    assert cluster.lost_answers == 0
    assert all(each.reason for each in cluster.wanted)
    policy = cluster.state.placing
    grown = [
        b.now_s - a.now_s
        for a, b in zip(cluster.wanted, cluster.wanted[1:], strict=False)
        if b.extra_chains > a.extra_chains
    ]
    left = [
        b.now_s - a.now_s
        for a, b in zip(cluster.wanted, cluster.wanted[1:], strict=False)
        if b.leaving and b.extra_chains == a.extra_chains
    ]
    assert all(gap >= policy.crowded_s for gap in grown)
    assert all(gap >= policy.calm_s for gap in left)


@pytest.mark.parametrize("total", [3, 12])
def test_a_steady_load_with_noise_settles_once(total: int) -> None:
    cluster, chance = AskedCluster(), random.Random(total)
    for _ in range(120):
        cluster.serve_asked(5, round(total * chance.uniform(0.8, 1.2)))
    settled = len(cluster.wanted)
    for _ in range(240):
        cluster.serve_asked(5, round(total * chance.uniform(0.8, 1.2)))
    assert len(cluster.wanted) == settled


def test_demand_is_not_remembered_and_copies_are() -> None:
    cluster = AskedCluster()
    cluster.serve_asked(60, 20)
    known = memorable(cluster.state)
    assert known.demand == {}
    assert known.models[SMALL.name].extra_chains == cluster.state.models[SMALL.name].extra_chains > 0
