"""Machines and lines that change while they serve: found within half a minute, and noise moves nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from shardcompute.control import Record, apply, memorable, next_actions
from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control.placement.cost_model import score
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.placement.place import Placement, place
from shardcompute.control.placement.request import placement_request
from shardcompute.control.sizes import sizes_of
from shardcompute.control.watch.estimates import DecayedEstimate, observe
from support.swarm.noisy_cluster import MIB, SMALL, Machine, NoisyCluster

WINDOW_S = 5.0
RATE = 2e6
"""Lines so thin that a tenth of them is felt."""


class ServingCluster(NoisyCluster):
    """One that serves all the time: stages and rings are timed in windows, as workers and drivers do it."""

    def __init__(
        self,
        names: str,
        memory_bytes: int,
        seed: int,
        noise: float,
        line: tuple[float, float] = (0.002, RATE),
    ) -> None:
        self.line = line
        self.thin: dict[frozenset[str], float] = {}
        """Lines that carry another part of what they did."""
        machines = {name: Machine(memory_bytes=memory_bytes) for name in names}
        super().__init__(machines, seed=seed, noise=noise)
        self.probes = 0

    def measure_links(self, share: float = 1.0) -> None:
        for a in (*self.machines, self.state.driver):
            for b in self.machines:
                if a < b or a == self.state.driver:
                    self.measure_link(a, b)

    def measure_link(self, a: str, b: str) -> None:
        rtt_s, rate = self._line(a, b)
        self.tell(happened.LinkMeasured(a, b, self.off(rtt_s), self.off(rate)))

    def _line(self, a: str, b: str) -> tuple[float, float]:
        return self.line[0], self.line[1] * self.thin.get(frozenset((a, b)), 1.0)

    def serve(self, seconds: float) -> None:
        """Under load: a window for each stage and ring, now and then."""
        until_s, due_s = self.now_s + seconds, self.now_s + WINDOW_S
        while self.now_s < until_s:
            self.now_s += 1.0
            if self.now_s >= due_s:
                due_s += WINDOW_S
                self.time_steps()
            self.turn()

    def time_steps(self) -> None:
        layer_bytes = sizes_of(self.model).work_before[-1] / self.model.layer_count
        for chain in self.state.live_chains():
            if chain.status != "ready":
                continue
            for stage in chain.stages:
                layer_s = self.off(self.machines[stage.node].seconds_per_byte * layer_bytes)
                life, place = self.state.nodes[stage.node].incarnation, (stage.start, stage.stop)
                self.tell(
                    happened.StageTimed(
                        node=stage.node,
                        incarnation=life,
                        chain=chain.id,
                        model=self.model.name,
                        start=place[0],
                        stop=place[1],
                        loaded_s=4e-11 * layer_bytes,
                        layer_s=layer_s,
                        now_s=self.now_s,
                    )
                )
            ring = (self.state.driver, *chain.nodes, self.state.driver)
            wire_s = sum(self._hop_s(a, b) for a, b in pairwise(ring))
            step_s = wire_s + sum(
                self.machines[stage.node].seconds_per_byte * layer_bytes * (stage.stop - stage.start)
                for stage in chain.stages
            )
            timed = happened.RingTimed(chain.id, chain.epoch, self.off(step_s), self.off(wire_s), self.now_s)
            self.tell(timed)

    def _hop_s(self, a: str, b: str) -> float:
        rtt_s, rate = self._line(a, b)
        return rtt_s / 2 + 2 * self.model.hidden / rate

    def _do(self, action: object) -> None:
        if isinstance(action, to_do.ProbeLink):
            self.probes += 1
            for _ in range(action.times):
                self.measure_link(action.node, action.peer)
            self.tell(happened.LinkProbed(action.node, action.peer, self.now_s))
        else:
            super()._do(action)  # type: ignore[arg-type]

    def share_of_best(self) -> float:
        """What the layout is worth, as a part of the best one's worth, by what machines and lines truly are."""
        [chain] = self.state.live_chains()
        request = placement_request(self.state, self.model, self.now_s, chain=chain)
        offers = tuple(
            replace(offer, seconds_per_byte=self.machines[offer.node].seconds_per_byte)
            for offer in request.offers
        )
        links = tuple(type(link)(link.a, link.b, *self._line(link.a, link.b)) for link in request.links)
        truly = replace(request, offers=offers, links=links)
        best = place(truly)
        assert isinstance(best, Placement)
        return score(truly, chain.stages).score / best.score


def settled(seed: int = 0, noise: float = 0.2, line: tuple[float, float] = (0.002, RATE)) -> ServingCluster:
    """Three machines hold the model, and two more could."""
    cluster = ServingCluster("abcde", 110 * MIB, seed, noise, line)
    cluster.request()
    cluster.serve(300)
    assert cluster.state.live_chains()[0].status == "ready"
    return cluster


@pytest.mark.parametrize("seed", range(3))
def test_a_stage_slowed_to_a_third_is_relieved_within_half_a_minute(seed: int) -> None:
    cluster = settled(seed)
    before = len(cluster.moved(happened.ChainReshaped))
    slow = cluster.shape[1]
    cluster.machines[slow] = replace(cluster.machines[slow], seconds_per_byte=1.2e-10)
    assert cluster.share_of_best() < 0.9
    cluster.serve(30)
    assert len(cluster.moved(happened.ChainReshaped)) == before + 1
    assert slow not in cluster.shape
    assert cluster.share_of_best() >= 0.9


@pytest.mark.parametrize("seed", range(3))
def test_a_line_at_a_tenth_is_gone_around_within_half_a_minute(seed: int) -> None:
    cluster = settled(seed)
    probes = cluster.probes
    line = frozenset(cluster.shape[:2])
    cluster.thin[line] = 0.1
    assert cluster.share_of_best() < 0.9
    cluster.serve(30)
    assert cluster.probes > probes, "steps said that some line changed, and probes which one"
    assert all({a, b} != line for a, b in pairwise(cluster.shape))
    assert cluster.share_of_best() >= 0.9


@pytest.mark.parametrize("seed", range(6))
def test_noise_moves_nothing_in_half_an_hour_of_load_or_of_idling(seed: int) -> None:
    cluster = settled(seed)
    planned, stages = cluster.counts["MovePlanned"], cluster.shape
    cluster.serve(1800)
    cluster.run(1800, 5)
    assert cluster.counts["MovePlanned"] == planned
    assert cluster.shape == stages


def test_an_estimate_tells_drift_from_noise() -> None:
    chance = random.Random(1)
    known: DecayedEstimate | None = None
    for second in range(0, 600, 5):
        known = observe(known, 0.01 * chance.uniform(0.8, 1.2), float(second))
        assert known is not None
        assert known.shift_from(0.01, 0.2) is None
    assert known is not None
    assert 0.05 < known.spread < 0.25
    assert known.mean == pytest.approx(0.01, rel=0.15)
    for second in range(600, 615, 5):
        assert known.shift_from(0.01, 0.2) is None, "twice is not enough"
        known = observe(known, 0.03 * chance.uniform(0.8, 1.2), float(second))
        assert known is not None
    assert known.shift_from(0.01, 0.2) == pytest.approx(0.03, rel=0.2)
    assert observe(known, float("nan"), 700.0) is known


def test_every_move_says_what_was_expected_and_later_what_came_of_it() -> None:
    cluster = settled(noise=0.02)
    slow = cluster.shape[1]
    cluster.machines[slow] = replace(cluster.machines[slow], seconds_per_byte=1.2e-10)
    cluster.serve(40)
    move = cluster.state.moves[-1]
    assert "better: from " in move.reason
    assert move.expected_after_s < move.expected_before_s
    assert move.measured_before_s > 0
    cluster.serve(30)
    judged = cluster.state.moves[-1]
    assert judged.measured_after_s < judged.measured_before_s
    assert judged.outcome.startswith("a step takes ")
    assert " times as fast, " in judged.outcome
    assert judged.outcome.endswith(" were expected")


def test_a_move_that_a_failure_overtakes_says_so() -> None:
    cluster = settled(noise=0.0)
    [chain] = cluster.state.live_chains()
    spare = next(name for name in cluster.machines if name not in chain.members)
    stages = (type(chain.stages[0])(spare, chain.stages[0].start, chain.stages[0].stop), *chain.stages[1:])
    cluster.tell(happened.MovePlanned(chain.id, chain.epoch, stages, "why", False, cluster.now_s))
    cluster.lose(chain.members[1])
    cluster.turn()
    assert cluster.state.moves[-1].outcome.startswith("not made: ")


def test_the_budget_of_an_hour_is_kept_whoever_comes_and_goes() -> None:
    """Each newcomer makes moves cheap again; four in an hour are all there are."""
    cluster = settled(noise=0.0, line=(1e-6, 1e12))
    speed = 4e-11
    for number in range(8):
        speed *= 0.5
        name = f"n{number:02}"
        cluster.machines[name] = Machine(memory_bytes=400 * MIB, seconds_per_byte=speed)
        cluster.join(name)
        cluster.measure_links()
        cluster.run(200, 5)
    made = cluster.counts["MovePlanned"]
    assert made == cluster.state.placing.moves_per_hour
    cluster.run(3600, 30)
    assert cluster.counts["MovePlanned"] > made, "the next hour has moves of its own"


def test_a_layout_that_is_kept_stays_and_a_dead_machine_is_replaced_all_the_same() -> None:
    cluster = settled(noise=0.0)
    cluster.tell(happened.LayoutKept(SMALL.name, True))
    shape = cluster.shape
    cluster.machines[shape[1]] = replace(cluster.machines[shape[1]], seconds_per_byte=1.2e-10)
    cluster.serve(300)
    assert cluster.shape == shape
    assert memorable(cluster.state).models[SMALL.name].is_kept
    cluster.request()
    assert cluster.state.models[SMALL.name].is_kept, "until somebody says otherwise"
    lost = shape[0]
    cluster.lose(lost)
    cluster.serve(30)
    assert lost not in cluster.shape
    assert cluster.state.live_chains()[0].status == "ready"
    held = cluster.shape
    cluster.tell(happened.LayoutKept(SMALL.name, False))
    cluster.serve(120)
    assert cluster.shape != held


def test_a_move_that_is_under_way_ends_where_the_layout_is_to_be_kept() -> None:
    cluster = settled(noise=0.0)
    [chain] = cluster.state.live_chains()
    spare = next(name for name in cluster.machines if name not in chain.members)
    stages = (type(chain.stages[0])(spare, chain.stages[0].start, chain.stages[0].stop), *chain.stages[1:])
    cluster.tell(happened.MovePlanned(chain.id, chain.epoch, stages, "why", False, cluster.now_s))
    cluster.tell(happened.LayoutKept(SMALL.name, True))
    cluster.turn()
    assert cluster.state.live_chains()[0].target is None
    assert cluster.state.moves[-1].outcome == "no move, the layout is to be kept"


def test_two_copies_do_not_move_to_the_same_machine() -> None:
    """Both have a slow stage, and one machine is better than any of theirs."""
    cluster = ServingCluster("abcd", 400 * MIB, 0, 0.0)
    cluster.request(chain_count=2, parallel=Parallelism(pp=1))
    cluster.serve(300)
    first, second = cluster.state.live_chains()
    assert not set(first.members) & set(second.members)
    for name in (*first.members, *second.members):
        cluster.machines[name] = replace(cluster.machines[name], seconds_per_byte=2e-10)
    for name, speed in (("x", 1e-11), ("y", 2e-11)):
        # Room for both copies at once: it is not memory that keeps them apart.
        cluster.machines[name] = Machine(memory_bytes=2000 * MIB, seconds_per_byte=speed)
        cluster.join(name)
    cluster.measure_links()
    cluster.now_s += 120
    cluster.time_steps()
    cluster.time_steps()
    cluster.time_steps()
    for node in cluster.state.nodes.values():
        cluster.tell(happened.NodeSeen(node.id, node.incarnation, cluster.now_s))
    events = [each.event for each in next_actions(cluster.state, cluster.now_s) if isinstance(each, Record)]
    plans = [event for event in events if isinstance(event, happened.MovePlanned)]
    targets = [{node for stage in plan.stages for node in stage.members} for plan in plans]
    assert len(plans) == 2, [type(each).__name__ for each in events]
    assert not targets[0] & targets[1]


def test_times_of_what_a_node_does_not_hold_are_not_taken_in() -> None:
    cluster = settled(noise=0.0)
    node = cluster.state.nodes[cluster.shape[0]]
    for start, stop in ((0, 1), (3, 2)):
        event = happened.StageTimed(
            node=node.id,
            incarnation=node.incarnation,
            chain="m#1",
            model=SMALL.name,
            start=start,
            stop=stop,
            loaded_s=1.0,
            layer_s=1.0,
            now_s=cluster.now_s,
        )
        assert apply(cluster.state, event) is cluster.state
    [chain] = cluster.state.live_chains()
    late = happened.RingTimed(chain.id, chain.epoch - 1, 1.0, 1.0, cluster.now_s)
    assert apply(cluster.state, late) is cluster.state


def test_rings_of_other_drivers_count_where_the_own_one_is_silent_and_are_not_mixed() -> None:
    cluster = settled(noise=0.0)
    [chain] = cluster.state.live_chains()
    own = chain.ring
    assert own is not None

    def see(wire_s: float, driver: str) -> None:
        cluster.now_s += 5
        event = happened.RingTimed(chain.id, chain.epoch, 1.0, wire_s, cluster.now_s, driver)
        cluster.state = apply(cluster.state, event)

    see(0.5, "far")
    assert cluster.state.chains[chain.id].ring == own, "it has a ring of its own"
    cluster.now_s += 60
    for wire_s in (0.5, 0.5, 0.5):
        see(wire_s, "far")
    ring = cluster.state.chains[chain.id].ring
    assert ring is not None
    assert (ring.driver, ring.usual_wire_s, ring.doubtful) == ("far", 0.5, ())
    for wire_s in (2.0, 2.0, 2.0):
        see(wire_s, "far")
    ring = cluster.state.chains[chain.id].ring
    assert ring is not None
    assert {"far", chain.nodes[0]} in [set(pair) for pair in ring.doubtful]
    assert all(cluster.state.driver not in pair for pair in ring.doubtful)
    see(0.1, "")
    ring = cluster.state.chains[chain.id].ring
    assert ring is not None
    assert ring.driver == "", "the chain's own driver is heard at once"
