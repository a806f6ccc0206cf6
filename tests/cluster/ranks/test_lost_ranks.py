"""Ranks die, hang and lose each other in the middle of answers: clients get the undisturbed tokens all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardcompute.control.placement.parallelism import AUTO
from support.models.requests import mixture
from support.swarm.grids import Grid, reshape
from support.swarm.lab import Alone, LabSwarm, LabWorker, Talk, swarm

STREAMING, TOKENS, ARRIVED = 4, 100, 5
ROOMS = (12, 12, 12, 12)
Harm = Callable[[LabSwarm, LabWorker, LabWorker], None]


def kill(lab: LabSwarm, victim: LabWorker, other: LabWorker) -> None:
    lab.kill(victim)


def freeze(lab: LabSwarm, victim: LabWorker, other: LabWorker) -> None:
    lab.freeze(victim)


def cut(lab: LabSwarm, victim: LabWorker, other: LabWorker) -> None:
    lab.cut(victim.node, other.node)


def start_streams(lab: LabSwarm, alone: Alone) -> list[Talk]:
    talks = [lab.start(request) for request in mixture(alone, STREAMING, TOKENS)]
    lab.wait_until(lambda: all(len(talk.tokens) >= ARRIVED for talk in talks), "tokens of all streams")
    assert not any(talk.is_over for talk in talks)
    return talks


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("harm", [kill, freeze])
def test_a_rank_is_lost(tmp_path: Path, tiny: Path, alone: Alone, harm: Harm, rank: int) -> None:
    with swarm(tmp_path, tiny, layers=ROOMS, parallel=AUTO) as lab:
        reshape(lab, [[1, 1]])
        talks = start_streams(lab, alone)
        victim = lab.workers[rank]
        harm(lab, victim, lab.workers[1 - rank])
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        assert victim.node not in lab.chain().members
        lab.wait_quiet()


@pytest.mark.parametrize("grid", [[[1, 1]], [[1], [1, 1, 1]]], ids=["2 ranks", "behind another stage"])
def test_a_link_between_ranks_breaks_and_the_group_goes_on(
    tmp_path: Path, tiny: Path, alone: Alone, grid: Grid
) -> None:
    with swarm(tmp_path, tiny, layers=ROOMS, parallel=AUTO) as lab:
        stages = reshape(lab, grid)
        talks = start_streams(lab, alone)
        epoch = lab.chain().epoch
        # Of three, the two that follow: the one that leads is told of it.
        *_, a, b = lab.chain().members
        lab.cut(a, b)
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        assert lab.chain().stages == stages, lab.chain().last_move
        assert lab.chain().epoch > epoch
        resumption = lab.activations[-1].resumption
        assert resumption is not None, "all ranks have kept what they hold"
        assert len(resumption.lengths or ()) >= STREAMING
        lab.wait_quiet()


@pytest.mark.long
def test_a_link_between_ranks_that_stays_broken(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=ROOMS, parallel=AUTO) as lab:
        stages = reshape(lab, [[1, 1]])
        talks = start_streams(lab, alone)
        lab.cut(*lab.chain().members, is_lasting=True)
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        assert lab.chain().stages != stages
        lab.wait_quiet()


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
def test_a_rank_leaves_in_order(tmp_path: Path, tiny: Path, alone: Alone, rank: int) -> None:
    with swarm(tmp_path, tiny, layers=ROOMS, parallel=AUTO) as lab:
        reshape(lab, [[1, 1]])
        talks = start_streams(lab, alone)
        leaving = lab.workers[rank]
        lab.leave(leaving)
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        assert leaving.node not in lab.chain().members
        lab.wait_quiet()


def test_ranks_wait_for_a_coordinator_that_comes_back(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=ROOMS, parallel=AUTO) as lab:
        stages = reshape(lab, [[1, 1]])
        loads = [list(worker.loads) for worker in lab.workers[:2]]
        lab.kill_cluster()
        lab.open_cluster()
        lab.serve()
        lab.wait_serving()
        assert lab.chain().stages == stages
        request = mixture(alone, 1, 20)[0]
        assert lab.ask(request) == alone.answer(request)
        assert [worker.loads for worker in lab.workers[:2]] == loads, "nothing is loaded again"
