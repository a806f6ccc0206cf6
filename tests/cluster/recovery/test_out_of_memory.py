"""Devices that run out of memory while they load or serve: the plan changes, nothing hangs, answers go on the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcompute.core.errors import CapacityError
from shardcompute.node.worker.memory.offer import RecoveryPolicy
from shardcompute.weights.shard_cache import ShardCache
from support.models.full_device import FullDevice, loading_onto
from support.models.requests import mixture
from support.swarm.lab import SPREAD, Alone, LabSwarm, LabWorker, swarm

WORKERS = 4


@contextmanager
def devices(lab_folder: Path) -> Iterator[dict[str, FullDevice]]:
    """A device for every worker to come, by the worker's name."""
    by_name = {f"worker-{number}": FullDevice() for number in range(1, WORKERS + 1)}

    def find(cache: ShardCache) -> FullDevice | None:
        return next((device for name, device in by_name.items() if name in str(cache.folder)), None)

    with loading_onto(find):
        yield by_name


def device_of(lab: LabSwarm, by_name: dict[str, FullDevice], worker: LabWorker) -> FullDevice:
    return by_name[worker.folder.name]


@pytest.mark.parametrize("stage", [0, 1], ids=["first", "last"])
def test_an_answer_goes_on_when_a_device_is_full(
    tmp_path: Path, tiny: Path, alone: Alone, stage: int
) -> None:
    """Two of three machines hold the model; the one whose device fills up gives its layers to the third."""
    requests = mixture(alone, 3, 60)
    with devices(tmp_path) as by_name, swarm(tmp_path, tiny, layers=(4, 4, 4), stages=2) as lab:
        talks = [lab.start(request) for request in requests]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        full = lab.stage(stage)
        device_of(lab, by_name, full).is_full = lambda step: True
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        assert full.node not in lab.chain().nodes
        node = lab.state.nodes[full.node]
        assert node.memory_bytes < lab.room_for(4)
        assert "memory ran out while a step was computed" in node.memory_reason
        assert node.memory_bytes <= full.view().memory_bytes
        lab.wait_quiet()


def test_a_moment_without_memory_is_not_noticed(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """What can be freed is, and the step is computed again: nobody has to move."""
    [request] = mixture(alone, 1, 60)
    with devices(tmp_path) as by_name, swarm(tmp_path, tiny, layers=(4, 4), stages=2) as lab:
        epoch = lab.chain().epoch
        for device in by_name.values():
            device.is_full = lambda step, first=device.steps: (step - first) % 7 == 3
        assert lab.ask(request) == alone.answer(request)
        assert lab.chain().epoch == epoch


def test_a_machine_that_cannot_load_gives_way(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    [request] = mixture(alone, 1, 30)
    with devices(tmp_path) as by_name:
        by_name["worker-1"].is_full_for = lambda start, stop: True
        with swarm(tmp_path, tiny, layers=(4, 4, 4), stages=2) as lab:
            assert lab.ask(request) == alone.answer(request)
            first = next(worker for worker in lab.workers if worker.folder.name == "worker-1")
            assert first.node not in lab.chain().nodes
            assert lab.state.nodes[first.node].shards == ()


def test_a_machine_holds_as_many_layers_as_truly_fit(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """Both lie about their memory, one of them by much: it is given fewer layers until they fit."""
    [request] = mixture(alone, 1, 30)
    with devices(tmp_path) as by_name:
        by_name["worker-1"].is_full_for = lambda start, stop: stop - start > 2
        with swarm(tmp_path, tiny, layers=(7, 7), placing=SPREAD) as lab:
            assert lab.ask(request) == alone.answer(request)
            held = {
                lab.worker(stage.node).folder.name: stage.stop - stage.start for stage in lab.chain().stages
            }
            assert held.get("worker-1", 0) <= 2


def test_when_no_machine_can_answers_fail_with_the_reason(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    [request] = mixture(alone, 1, 200)
    with devices(tmp_path) as by_name, swarm(tmp_path, tiny, layers=(8,), stages=1) as lab:
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) >= 3, "some tokens")
        by_name["worker-1"].is_full = lambda step: True
        with pytest.raises(CapacityError, match="memory"):
            talk.result()
        lab.wait_until(lambda: lab.chain().status == "broken", lab.describe)


def test_memory_that_is_free_again_serves_again(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """Nobody restarts anything: the only machine measures that its memory is free, offers it, and is used."""
    [request] = mixture(alone, 1, 30)
    recovery = RecoveryPolicy(first_wait_s=0.4)
    with devices(tmp_path) as by_name, swarm(tmp_path, tiny, layers=(8,), stages=1, recovery=recovery) as lab:
        [worker] = lab.workers
        whole_bytes = lab.state.nodes[worker.node].memory_bytes
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) >= 3, "some tokens")
        by_name["worker-1"].is_full = lambda step: True
        with pytest.raises(CapacityError, match="memory"):
            talk.result()
        by_name["worker-1"].is_full = lambda step: False
        lab.wait_until(lambda: lab.is_serving(stages=1), lab.describe)
        node = lab.state.nodes[worker.node]
        assert (node.memory_bytes, node.memory_reason, worker.view().problem) == (whole_bytes, "", "")
        assert lab.ask(request) == alone.answer(request)
