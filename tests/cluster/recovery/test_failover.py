"""Machines die, hang and lose each other in the middle of answers: clients get the undisturbed tokens all the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardcompute.core.generation import GenerationRequest
from support.models.requests import mixture, prompts, scored
from support.swarm.lab import SPREAD, Alone, LabSwarm, LabWorker, Talk, swarm

STANDBYS = (2, 2, 2, 2, 2, 2)
"""Three stages, and a standby for each."""
NO_STANDBYS = (4, 4, 4)
"""Three stages, of which any two have room for all."""
STREAMING, TOKENS, ARRIVED = 4, 120, 5


def kill(lab: LabSwarm, worker: LabWorker) -> None:
    lab.kill(worker)


def freeze(lab: LabSwarm, worker: LabWorker) -> None:
    lab.freeze(worker)


def cut(lab: LabSwarm, worker: LabWorker) -> None:
    """The link over which frames come in."""
    nodes = (lab.cluster.node, *lab.chain().nodes)
    lab.cut(nodes[nodes.index(worker.node) - 1], worker.node)


def start_streams(lab: LabSwarm, alone: Alone) -> list[Talk]:
    """Requests of all kinds that have answered for a while, and some that have just come in."""
    requests = mixture(alone, STREAMING, TOKENS)
    talks = [lab.start(request) for request in requests]
    lab.wait_until(lambda: all(len(talk.tokens) >= ARRIVED for talk in talks), "tokens of all streams")
    texts = sorted(prompts(alone.service.tokenizer), key=len)
    late: list[GenerationRequest] = [scored(texts[-1], 20), *mixture(alone, 2, 20)]
    talks += [lab.start(request) for request in late]
    assert not any(talk.is_over for talk in talks)
    return talks


def assert_undisturbed(lab: LabSwarm, alone: Alone, talks: Sequence[Talk]) -> None:
    for talk in talks:
        assert talk.result() == alone.answer(talk.request)
    lab.wait_quiet()


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("harm", [kill, freeze, cut])
def test_with_a_standby(
    tmp_path: Path, tiny: Path, alone: Alone, harm: Callable[[LabSwarm, LabWorker], None], stage: int
) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        talks = start_streams(lab, alone)
        before = lab.chain().stages
        harm(lab, lab.stage(stage))
        assert not any(talk.is_over for talk in talks[:STREAMING])
        assert_undisturbed(lab, alone, talks)
        after = lab.chain().stages
        kept = [a == b for a, b in zip(before, after, strict=True)]
        assert kept == [index != stage or harm is cut for index in range(3)]
        resumption = lab.activations[-1].resumption
        assert resumption is not None
        assert resumption.lengths is not None
        assert len(resumption.lengths) >= STREAMING
        assert resumption.has_new_first == (stage == 0 and harm is not cut)
        assert len(lab.activations) == 2


def test_what_is_kept_of_ended_answers_is_not_replayed(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """It is dropped after a change of shape, and those who are being answered would have to wait for it."""
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        for request in mixture(alone, 3, 24):
            lab.ask(request)
        kept = lab.stage(0).session_ids()
        talks = start_streams(lab, alone)
        assert lab.stage(0).session_ids() & kept, "the test needs some that are kept"
        kill(lab, lab.stage(1))
        assert_undisturbed(lab, alone, talks)
        resumption = lab.activations[-1].resumption
        assert resumption is not None
        assert resumption.lengths
        assert not kept & resumption.lengths.keys()


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("harm", [kill, freeze])
def test_without_one_the_survivors_share_the_layers(
    tmp_path: Path, tiny: Path, alone: Alone, harm: Callable[[LabSwarm, LabWorker], None], stage: int
) -> None:
    with swarm(tmp_path, tiny, layers=NO_STANDBYS, stages=3, placing=SPREAD) as lab:
        assert not lab.chain().standbys
        talks = start_streams(lab, alone)
        victim = lab.stage(stage)
        harm(lab, victim)
        assert not any(talk.is_over for talk in talks[:STREAMING])
        assert_undisturbed(lab, alone, talks)
        assert len(lab.chain().stages) == 2
        assert victim.node not in lab.chain().nodes
        assert lab.activations[-1].resumption is None, "other cuts: all is computed again"


def test_the_way_back_to_the_driver_is_cut(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=NO_STANDBYS, stages=3, placing=SPREAD) as lab:
        talks = start_streams(lab, alone)
        lab.cut(lab.stage(-1).node, lab.cluster.node)
        assert_undisturbed(lab, alone, talks)
        assert len(lab.chain().stages) == 3


def test_two_neighbours_at_once_are_too_many_for_the_log(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        talks = start_streams(lab, alone)
        for victim in (lab.stage(1), lab.stage(2)):
            lab.kill(victim)
        assert_undisturbed(lab, alone, talks)
        assert lab.activations[-1].resumption is None


def test_two_that_are_no_neighbours_are_not(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        talks = start_streams(lab, alone)
        for victim in (lab.stage(0), lab.stage(2)):
            lab.kill(victim)
        assert_undisturbed(lab, alone, talks)
        resumption = lab.activations[-1].resumption
        assert resumption is not None
        assert resumption.has_new_first
        assert len(resumption.lengths or ()) >= STREAMING


def test_a_log_that_is_too_small(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3, log_bytes=1024) as lab:
        talks = start_streams(lab, alone)
        lab.kill(lab.stage(1))
        assert_undisturbed(lab, alone, talks)
        resumption = lab.activations[-1].resumption
        assert resumption is not None
        assert resumption.lengths == {}


def test_every_stage_dies_once_in_one_answer(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """A stage that was told what it missed can tell it on."""
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        talk = lab.start(mixture(alone, 2, 300)[1])
        for count, stage in enumerate((1, 2, 0), start=1):
            arrived = len(talk.tokens)
            lab.wait_until(lambda arrived=arrived: len(talk.tokens) > arrived + ARRIVED, "more tokens")
            lab.kill(lab.stage(stage))
            lab.wait_until(lambda count=count: len(lab.activations) > count, "another epoch")
            assert not talk.is_over
        assert_undisturbed(lab, alone, [talk])
        kept = [activation.resumption for activation in lab.activations[1:]]
        assert [len(each.lengths or ()) for each in kept if each is not None] == [1, 1, 1]


def test_a_frozen_machine_comes_back(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = start_streams(lab, alone)
        victim = lab.stage(0)
        lab.freeze(victim)
        assert_undisturbed(lab, alone, talks)
        assert lab.state.nodes[victim.node].status == "lost"
        lab.thaw(victim)
        lab.wait_serving(stages=3, standbys=1)
        assert victim.node in lab.ready_standbys(lab.chain())
        assert_undisturbed(lab, alone, start_streams(lab, alone))


def test_a_freeze_too_short_to_matter(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = start_streams(lab, alone)
        lab.freeze(lab.stage(1))
        lab.wait_until(
            lambda: any(node.status == "suspected" for node in lab.state.nodes.values()), "a suspicion"
        )
        lab.thaw(lab.stage(1))
        assert_undisturbed(lab, alone, talks)
        assert len(lab.activations) == 1


def test_a_link_that_stays_cut_is_planned_around(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = start_streams(lab, alone)
        first, second, _ = lab.chain().nodes
        lab.cut(first, second, is_lasting=True)
        assert_undisturbed(lab, alone, talks)
        nodes = lab.chain().nodes
        assert (first, second) not in itertools.pairwise(nodes)
        assert (second, first) not in itertools.pairwise(nodes)


def test_a_worker_whose_control_link_alone_breaks(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """It dials again and goes on: nothing is loaded or replayed, unless that took so long that it was given up."""
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = start_streams(lab, alone)
        victim = lab.stage(1)
        incarnation = lab.state.nodes[victim.node].incarnation
        statuses: set[str] = set()
        lab.cluster.coordinator.listen(lambda state: statuses.add(state.nodes[victim.node].status))
        assert lab.network.break_control(victim.node) == 1
        lab.wait_until(lambda: lab.state.nodes[victim.node].incarnation > incarnation, "it is back")
        assert_undisturbed(lab, alone, talks)
        lab.wait_serving(stages=3, standbys=1)
        assert "suspected" in statuses
        assert (len(lab.activations) == 1) == ("lost" not in statuses)
        if "lost" not in statuses:
            assert all(len(worker.loads) == 1 for worker in lab.workers)
