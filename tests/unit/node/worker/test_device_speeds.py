"""What a worker tells of its device's speed, and what it remembers of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from shardcompute.control.state import LayerShape, RankPlace
from shardcompute.core.errors import BackendError
from shardcompute.node.worker import device_speeds
from shardcompute.node.worker.device_speeds import DeviceSpeeds
from shardcompute.node.worker.shard_loader import MeasuredShard
from shardcompute.node.worker.speed_book import DeviceKey, SpeedBook
from shardcompute.node.worker.speed_probe import BackendSpeed, ShardSpeed, StageSpeed
from shardcompute.node.worker.stages.service_pace import ShardPace
from support.models.full_device import OutOfMemoryError

CARD = DeviceKey("NVIDIA H200", "torch", "cuda:0", 2)
HOST = DeviceKey("AMD EPYC", "onnx", "cpu", 2)
SPEED = BackendSpeed(1e-12, 1e-14, 1e-4)
KEY = ("m#1", 0, 2, None)
MEASURED = MeasuredShard(
    LayerShape(64, 1000, "native"), ShardSpeed(StageSpeed(0.02, 0.03, 0.002), 0.01, 0.015, 0.001)
)


@pytest.fixture
def probe() -> Iterator[mock.Mock]:
    with mock.patch.object(device_speeds, "probe_backend", return_value=SPEED) as probe:
        yield probe


def open_speeds(folder: Path, device: DeviceKey = CARD, now_s: float = 1e6) -> DeviceSpeeds:
    return DeviceSpeeds(device, SpeedBook(folder / "speeds.json"), lambda: now_s)


def test_the_device_is_probed_with_its_backend(tmp_path: Path, probe: mock.Mock) -> None:
    speeds = open_speeds(tmp_path)
    probe.assert_called_once_with("torch", "cuda:0", 2)
    assert (speeds.probed, speeds.probed_at_s) == (SPEED, 1e6)


def test_a_gpu_is_not_probed_again_at_the_next_start(tmp_path: Path, probe: mock.Mock) -> None:
    open_speeds(tmp_path)
    speeds = open_speeds(tmp_path, now_s=1e6 + 3600)
    assert probe.call_count == 1
    assert (speeds.probed, speeds.probed_at_s) == (SPEED, 1e6)
    open_speeds(tmp_path, now_s=1e6 + 30 * 86_400)
    assert probe.call_count == 2, "after a month it is"
    open_speeds(tmp_path, HOST)
    open_speeds(tmp_path, HOST)
    assert probe.call_count == 4, "and a CPU always is: that takes no time"


@pytest.mark.parametrize(
    "error", [BackendError("no such device"), RuntimeError("CUDA error"), OutOfMemoryError()]
)
def test_what_cannot_be_probed_is_guessed_and_says_so(
    tmp_path: Path, probe: mock.Mock, error: Exception
) -> None:
    probe.side_effect = error
    speeds = open_speeds(tmp_path)
    assert speeds.probed.seconds_per_byte > 0
    assert speeds.probed_at_s == 0.0


def test_what_was_loaded_is_told_and_remembered(tmp_path: Path, probe: mock.Mock) -> None:
    event = open_speeds(tmp_path).loaded(KEY, "m", MEASURED)
    assert (event.model, event.layer_s, event.shape) == ("m", 0.01, MEASURED.shape)
    assert (event.batch_layer_s, event.prefill_layer_s, event.is_served) == (0.015, 0.001, False)
    assert event.measured_at_s == 1e6
    [time] = open_speeds(tmp_path).remembered()
    assert (time.model, time.seconds, time.prefill_s, time.shape) == ("m", 0.01, 0.001, MEASURED.shape)
    assert open_speeds(tmp_path, HOST).remembered() == ()


def test_another_pace_is_told_of_what_is_held(tmp_path: Path, probe: mock.Mock) -> None:
    speeds = open_speeds(tmp_path)
    speeds.loaded(KEY, "m", MEASURED)
    event = speeds.paced(KEY, ShardPace(2.0, 3.0))
    assert event is not None
    assert (event.chain, event.start, event.stop, event.loaded_s) == ("m#1", 0, 2, 0.01)
    assert (event.layer_s, event.batch_layer_s, event.prefill_layer_s) == pytest.approx((0.02, 0.03, 0.003))
    prompts = speeds.paced(KEY, ShardPace(prefill=3.0))
    assert prompts is not None
    assert (prompts.layer_s, prompts.batch_layer_s) == (None, None), "nothing was decoded"
    [time] = speeds.remembered()
    assert time.seconds == 0.01, "what a bad hour has shown is not remembered for the next start"
    speeds.unloaded(KEY)
    assert speeds.paced(KEY, ShardPace(2.0, 3.0)) is None


def test_the_pace_of_a_share_is_that_of_all_its_ranks(tmp_path: Path, probe: mock.Mock) -> None:
    speeds = open_speeds(tmp_path)
    key = ("m#1", 0, 3, RankPlace(1, (2, 1)))
    speeds.loaded(key, "m", MEASURED)
    event = speeds.paced(key, ShardPace(2.0, 3.0))
    assert event is not None
    assert event.is_group, "it says nothing of this machine alone"
    assert event.loaded_s == pytest.approx(MEASURED.speed.layer_s / 3)
    assert event.layer_s == pytest.approx(MEASURED.speed.layer_s * 2.0 / 3)
