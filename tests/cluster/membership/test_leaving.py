"""Whoever says goodbye has left, and whoever dies is missed at once: neither is waited for in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.control import HealthPolicy
from shardcompute.core.errors import CapacityError
from support.swarm.lab import SPREAD, STILL, Alone, LabSwarm, swarm
from support.swarm.streams import assert_undisturbed, start_streams

PATIENT = HealthPolicy(
    heartbeat_interval_s=0.5, suspect_after_s=1e6, lost_after_s=1e6, lost_after_reset_s=1e6
)
"""Nobody is given up for being silent, nor for a link that broke."""


def statuses(lab: LabSwarm, node: str) -> list[str]:
    """What a node is taken for, from now on."""
    seen: list[str] = []
    lab.cluster.coordinator.listen(lambda state: seen.append(state.nodes[node].status))
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("has_standby", [True, False], ids=["to a standby", "to the others"])
def test_a_machine_that_leaves_hands_over_first(
    tmp_path: Path, tiny: Path, alone: Alone, stage: int, has_standby: bool
) -> None:
    layers, placing = ((2, 2, 2, 2), STILL) if has_standby else ((7, 7, 7), SPREAD)
    with swarm(tmp_path, tiny, layers=layers, stages=3, standbys=int(has_standby), placing=placing) as lab:
        talks = start_streams(lab, alone)
        leaver = lab.stage(stage)
        seen = statuses(lab, leaver.node)
        lab.leave(leaver)
        assert lab.state.nodes[leaver.node].status == "gone"
        assert not {"suspected", "lost"} & set(seen)
        assert_undisturbed(lab, alone, [*talks, *start_streams(lab, alone, 2, 20)])
        assert len(lab.chain().stages) == (3 if has_standby else 2)


def test_one_whose_work_nobody_can_do_leaves_all_the_same(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = start_streams(lab, alone)
        leaver = lab.stage(1)
        lab.leave(leaver, patience_s=0.05)
        assert lab.state.nodes[leaver.node].status == "gone"
        for talk in talks:
            with pytest.raises(CapacityError, match="are missing"):
                talk.result()
        returned = lab.revive(leaver)
        lab.wait_serving(stages=3)
        assert not lab.state.nodes[returned.node].is_draining
        assert_undisturbed(lab, alone, start_streams(lab, alone, 2, 20))


def test_a_driver_that_leaves_is_forgotten_at_once(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        driver = lab.add_driver()
        lab.wait_driving(driver)
        talks = start_streams(lab, alone)
        seen = statuses(lab, driver.node)
        driver.leave()
        assert lab.state.nodes[driver.node].status == "gone"
        assert not {"suspected", "lost"} & set(seen)
        lab.drivers.remove(driver)
        driver.close()
        lab.wait_driving()
        assert_undisturbed(lab, alone, talks)
        assert {each.kv_tokens for each in lab.chain().drivers} == {lab.options.kv_tokens}


def test_a_cluster_that_stops_keeps_who_goes_with_it(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        stages, models = lab.chain().stages, set(lab.state.models)
        lab.cluster.coordinator.stand_down()
        former = list(lab.workers)
        for worker in former:
            lab.leave(worker)
        assert {node.is_live for node in lab.state.nodes.values()} == {True}
        lab.kill_cluster()
        lab.open_cluster()
        assert set(lab.state.models) == models
        lab.serve()
        for worker in former:
            lab.revive(worker)
        lab.wait_serving(stages=3)
        assert lab.chain().stages == stages


def test_a_dead_process_is_missed_before_its_heartbeats_are(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1, health=PATIENT) as lab:
        talks = start_streams(lab, alone)
        victim = lab.stage(1)
        lab.kill(victim)
        assert_undisturbed(lab, alone, talks)
        assert lab.state.nodes[victim.node].status_reason == "its process has ended"


def test_one_that_lives_is_not_taken_for_dead_when_its_links_break(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1, health=PATIENT) as lab:
        talks = start_streams(lab, alone)
        before, after = lab.chain().stages, lab.stage(1)
        seen = statuses(lab, after.node)
        lab.cut(lab.stage(0).node, after.node)
        lab.cut(after.node, lab.stage(2).node)
        assert lab.network.break_control(after.node) > 0
        lab.wait_until(lambda: lab.state.nodes[after.node].incarnation > 1, "it has dialled again")
        assert_undisturbed(lab, alone, talks)
        assert "lost" not in seen
        assert lab.chain().stages == before


def test_what_never_could_be_reached_proves_nothing(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """A machine that the coordinator cannot dial refuses it while it lives, too."""
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, health=PATIENT) as lab:
        newcomer = lab.add_worker(2, advertise="127.0.0.9")
        lab.wait_until(lambda: newcomer.node in lab.state.nodes, "it is there")
        seen = statuses(lab, newcomer.node)
        assert lab.network.break_control(newcomer.node) > 0
        lab.wait_until(lambda: lab.state.nodes[newcomer.node].incarnation > 1, "it has dialled again")
        assert "lost" not in seen
