"""Calm: what is measured is noisy, and layouts do not follow the noise; what must be done is done at once."""

from __future__ import annotations

import pytest

from shardcompute.control import Event, PlacementPolicy, apply, decode_event, encode_event, next_actions
from shardcompute.control import events as happened
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.state import Assignment, Unrest
from support.swarm.noisy_cluster import MIB, SMALL, Machine, NoisyCluster

SLOW = Machine(seconds_per_byte=1.2e-10)
HOUR_S = 3600.0


def equal_machines(count: int, seed: int, **options: object) -> NoisyCluster:
    cluster = NoisyCluster({name: Machine() for name in "abcdef"[:count]}, seed=seed, **options)  # type: ignore[arg-type]
    cluster.request()
    return cluster


@pytest.mark.parametrize("seed", range(6))
def test_after_a_restart_standbys_are_not_swapped(seed: int) -> None:
    """The better layout is found anew with every measurement, and every load measures: none was ever reached."""
    cluster = NoisyCluster({"a": SLOW, "b": Machine(), "c": Machine(), "d": Machine()}, seed=seed)
    for name in "bcd":
        cluster.lose(name)
    cluster.request()
    cluster.run(20, 0.5)
    for name in "bcd":
        cluster.join(name)
    cluster.run(10, 0.5)
    cluster.restart()
    restarted_s = cluster.now_s
    cluster.counts.clear()
    cluster.run(65, 0.25)
    assert len(cluster.moved(happened.StandbysChosen, since_s=restarted_s)) <= 2
    assert len(cluster.moved(happened.ChainReshaped, since_s=restarted_s)) <= 2, (
        "connected anew, and one move"
    )
    assert cluster.counts["LoadShard"] <= 4
    cluster.run(600, 5)
    assert "a" not in cluster.shape, "what is clearly better is still found"


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_an_idle_cluster_stays_as_it_is_for_hours(count: int, seed: int) -> None:
    cluster = equal_machines(count, seed)
    cluster.run(2 * HOUR_S, 10, remeasured_s=120)
    layouts = [event.stages for event in cluster.moved(happened.ChainReshaped)]
    assert len(layouts) <= 2
    assert len(cluster.moved(happened.StandbysChosen)) <= 2 + 2 * cluster.counts["MovePlanned"]
    assert cluster.counts["LoadShard"] <= count * (1 + 2 * cluster.counts["MovePlanned"])


def test_a_layout_lives_for_a_while_unless_a_machine_is_lost() -> None:
    cluster = NoisyCluster({"a": SLOW, "b": Machine()}, noise=0.0)
    cluster.lose("b")
    cluster.request()
    cluster.run(10)
    cluster.join("b")
    cluster.run(45)
    assert cluster.shape == ["a"], "it has served for less than a minute"
    cluster.run(30)
    assert cluster.shape == ["b"]
    cluster.lose("b")
    cluster.turn()
    assert cluster.shape == ["a"], "a loss is not waited with"


def test_what_must_be_moved_has_a_price() -> None:
    """What gains over ten minutes does not pay for six minutes of fetching."""
    for bytes_per_s, is_worth_it in ((1e8, True), (5e5, False)):
        cluster = NoisyCluster(
            {"a": Machine(seconds_per_byte=7e-11), "b": Machine()},
            noise=0.0,
            policy=PlacementPolicy(source_bytes_per_s=bytes_per_s),
        )
        assert moves_when_the_other_comes_back(cluster) is is_worth_it


def moves_when_the_other_comes_back(cluster: NoisyCluster) -> bool:
    """Whether a plan is made to move from `a`, which serves alone, to `b`, which was away."""
    cluster.lose("b")
    cluster.request()
    cluster.run(10)
    cluster.join("b")
    cluster.now_s += 120
    return any(isinstance(each, happened.MovePlanned) for each in decisions(cluster))


def decisions(cluster: NoisyCluster) -> list[Event]:
    for node in cluster.state.nodes.values():
        cluster.tell(happened.NodeSeen(node.id, node.incarnation, cluster.now_s))
    return [each.event for each in next_actions(cluster.state, cluster.now_s) if hasattr(each, "event")]


def test_one_measurement_of_a_machine_that_has_not_served_is_no_reason_to_move() -> None:
    """Machines that are alike differ by a third when each is measured once: only what is clearly more is believed."""
    for seconds_per_byte, is_worth_it in ((5.5e-11, False), (8e-11, True)):
        cluster = NoisyCluster({"a": Machine(seconds_per_byte=seconds_per_byte), "b": Machine()}, noise=0.0)
        assert moves_when_the_other_comes_back(cluster) is is_worth_it


def test_a_move_says_why_from_what_to_what_and_for_how_much() -> None:
    cluster = NoisyCluster({"a": SLOW, "b": Machine()}, noise=0.0)
    cluster.lose("b")
    cluster.request()
    cluster.run(10)
    cluster.join("b")
    cluster.run(120)
    said = cluster.state.live_chains()[0].last_move
    assert said.startswith("136% better: from A (0–29) to B (0–29), for ")
    assert "instead of" in said
    assert "to fetch, about" in said
    cluster.lose("b")
    cluster.turn()
    said = cluster.state.live_chains()[0].last_move
    assert said == "standby promoted because B is lost: its process has ended: from B (0–29) to A (0–29)"
    told = [event.reason for event in cluster.moved(happened.StandbysChosen)]
    assert told[0] == "B loads layers 0–29 to stand by"


def test_a_move_that_proves_worthless_is_dropped_and_not_tried_again() -> None:
    cluster = NoisyCluster({"a": Machine(), "b": Machine()}, noise=0.0)
    cluster.lose("b")
    cluster.request()
    cluster.run(10)
    # Its probe promises three times what it does once it has loaded the model.
    cluster.machines["b"] = Machine(seconds_per_byte=1.3e-11)
    cluster.join("b")
    cluster.machines["b"] = Machine()
    cluster.run(HOUR_S, 5)
    assert cluster.shape == ["a"]
    assert cluster.counts["MovePlanned"] <= 1
    if cluster.counts["MovePlanned"]:
        assert cluster.state.live_chains()[0].last_move.startswith(
            "no move, measured again B (0–29) would gain"
        )


def test_each_move_makes_the_next_one_dearer_until_the_machines_change() -> None:
    policy = PlacementPolicy()
    calm = Unrest(since_s=1000.0)
    assert calm.has_settled(policy, 1060.0)
    assert not calm.has_settled(policy, 1059.0)
    stages = (Assignment("b", 0, 3), Assignment("a", 3, 6))
    restless = calm.after_move(policy, 2000.0, stages).after_move(policy, 3000.0, (Assignment("c", 0, 6),))
    assert restless.factor(policy, 3000.0) == 4.0
    assert not restless.has_settled(policy, 3239.0)
    assert restless.has_settled(policy, 3240.0)
    assert restless.has_left(policy, 3000.0, stages[::-1])
    assert not restless.has_left(policy, 3000.0, stages[:1])
    long_after_s = 3000.0 + policy.forgotten_after_s
    assert restless.factor(policy, long_after_s) == 1.0
    assert not restless.has_left(policy, long_after_s, stages)


def test_a_newcomer_makes_a_move_cheap_again() -> None:
    cluster = equal_machines(2, 0)
    cluster.run(10)
    chain = cluster.state.live_chains()[0]
    stages = tuple(Assignment("b" if chain.nodes == ("a",) else "a", 0, 30) for _ in range(1))
    planned = happened.MovePlanned(chain.id, chain.epoch, stages, "why", False, cluster.now_s)
    cluster.tell(decode_event(encode_event(planned)))
    assert cluster.state.chains[chain.id].unrest.moves == 1
    cluster.machines["c"] = Machine()
    cluster.join("c")
    assert cluster.state.chains[chain.id].unrest.moves == 0
    cluster.join("c", with_shards=True)
    assert cluster.state.chains[chain.id].unrest.moves == 0


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_as_many_stages_as_a_person_asked_for(asked: int) -> None:
    cluster = NoisyCluster({name: Machine() for name in "abc"}, seed=asked)
    cluster.request(parallel=Parallelism(pp=asked))
    cluster.run(HOUR_S, 10, remeasured_s=120)
    assert len(cluster.shape) == asked
    cluster.restart()
    cluster.run(HOUR_S, 10, remeasured_s=120)
    assert len(cluster.shape) == asked


def test_what_was_asked_for_gives_way_to_a_loss_and_comes_back() -> None:
    cluster = NoisyCluster({name: Machine() for name in "abc"})
    cluster.request(parallel=Parallelism(pp=3))
    cluster.run(30)
    lost = cluster.shape[1]
    cluster.lose(lost)
    cluster.turn()
    assert len(cluster.shape) == 2, "with what is left, at once"
    cluster.join(lost)
    cluster.run(180)
    assert len(cluster.shape) == 3
    assert cluster.state.live_chains()[0].last_move.startswith("3 stages were asked for: from ")


def test_measured_once_is_not_believed() -> None:
    cluster = NoisyCluster({"a": Machine()}, noise=0.0)
    life = cluster.state.nodes["a"].incarnation

    def measured(layer_s: float) -> float:
        event = happened.NodeMeasured(node="a", incarnation=life, model=SMALL.name, layer_s=layer_s)
        cluster.state = apply(cluster.state, event)
        return cluster.state.nodes["a"].layer_times[0].seconds

    assert measured(0.001) == 0.001
    assert measured(0.009) == 0.001, "something else ran meanwhile"
    assert [measured(0.002), measured(0.002), measured(0.002)] == [0.002, 0.002, 0.002]
    cluster.tell(
        happened.LinkMeasured("a", "driver", 0.01, 1e6), happened.LinkMeasured("a", "driver", 0.01, 1e6)
    )
    link = cluster.state.link("a", "driver")
    assert link is not None
    assert (link.rtt_s, link.bytes_per_s) == (0.01, 1e6)
    cluster.tell(happened.LinkMeasured("a", "driver", 0.5, 1e3))
    assert cluster.state.link("a", "driver").rtt_s == 0.01  # type: ignore[union-attr]


def test_machines_with_too_little_memory_are_no_target() -> None:
    cluster = NoisyCluster({"a": SLOW, "b": Machine(memory_bytes=100 * MIB)}, noise=0.0)
    cluster.request()
    cluster.run(HOUR_S, 30)
    assert cluster.counts["MovePlanned"] == 0
