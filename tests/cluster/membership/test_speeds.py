"""Real workers measure what they load, and tell when their steps in service are slower than that."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from shardcompute.node.worker.speed_book import DeviceKey, SpeedBook
from shardcompute.node.worker.stages import service_pace
from support.models.requests import mixture
from support.swarm.lab import Alone, swarm


def test_steps_in_service_correct_what_was_measured(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """The lab's machines say that a layer takes 0.1 ms and a whole stage as long, which no stage keeps."""
    [request] = mixture(alone, 1, 120)
    with (
        swarm(tmp_path, tiny, layers=(4, 4), stages=2) as lab,
        mock.patch.object(service_pace, "LEAST_WINDOW_S", 0.0),
    ):
        stages = [lab.stage(0), lab.stage(1)]
        assert not any(time.is_served for node in lab.state.nodes.values() for time in node.layer_times)
        assert lab.ask(request) == alone.answer(request)
        lab.wait_until(
            lambda: all(
                any(time.is_served for time in lab.state.nodes[worker.node].layer_times) for worker in stages
            ),
            lambda: f"news of their pace: {[node.layer_times for node in lab.state.nodes.values()]}",
        )
        for worker in stages:
            [time] = lab.state.nodes[worker.node].layer_times
            assert (time.model, time.loaded_s) == (lab.model, 1e-4)
            assert time.seconds > 1.2e-4
            assert time.shape is not None


def test_what_was_measured_is_there_after_a_restart(tmp_path: Path, tiny: Path) -> None:
    with swarm(tmp_path, tiny, layers=(8,), stages=1) as lab:
        [worker] = lab.workers
        [before] = lab.state.nodes[worker.node].layer_times
        lab.kill(worker)
        again = lab.revive(worker)
        lab.wait_serving(stages=1)
        assert lab.state.nodes[again.node].probed_at_s > 0
        book = SpeedBook(worker.folder / "speeds.json")
        [kept] = [time for key in _devices(book) for time in book.models(key)]
        assert (kept.model, kept.seconds, kept.shape) == (before.model, before.seconds, before.shape)


def _devices(book: SpeedBook) -> list[DeviceKey]:
    return list(book._devices)
