"""A worker measures its device with the backend that will serve, in the shapes that it will serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from shardcompute.backends.executor import Executor, ExecutorOptions, KvUsage
from shardcompute.control.state import LayerShape
from shardcompute.core.errors import DeviceMemoryError
from shardcompute.core.steps import SessionRows
from shardcompute.models.spec import Stage
from shardcompute.node.worker import speed_probe
from shardcompute.node.worker.speed_probe import StageSpeed, measure_shard, measure_stage, probe_backend
from shardcompute.runtime.shard import build_executor
from shardcompute.runtime.stage import StageRuntime
from support.models.full_device import FullDevice
from support.models.networks import RandomTensors, plain_spec

MIDDLE = Stage(1, 3, 4)


class Steps:
    """In place of a stage: what it is asked to compute, on a clock on which each row takes a second."""

    def __init__(self, free_tokens: int = 10_000, fails_at: int = 0) -> None:
        self.work: list[list[SessionRows]] = []
        self.now_s = 0.0
        self.open: set[int] = set()
        self._free_tokens = free_tokens
        self._fails_at = fails_at

    def step(self, work: list[SessionRows], openings: Any, activations: Any) -> None:
        self.work.append(work)
        if len(self.work) == self._fails_at:
            raise DeviceMemoryError("memory ran out")
        rows = sum(len(part.ids) for part in work)
        assert activations is None or activations.shape == (rows, 8)
        self.open |= {part.session for part in work}
        self.now_s += rows * self.row_s

    row_s = 1e-3

    def clock(self) -> float:
        return self.now_s

    def close_sessions(self, sessions: Any) -> None:
        self.open -= set(sessions)

    def kv_usage(self) -> KvUsage:
        return KvUsage(0, 0, self._free_tokens, 0)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(sessions, rows) of each step."""
        return [(len(work), sum(len(part.ids) for part in work)) for work in self.work]


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps()
    with mock.patch.object(speed_probe.time, "perf_counter", side_effect=steps.clock):
        yield steps


def test_one_row_several_and_a_prompt_are_tried(steps: Steps) -> None:
    speed = measure_stage(steps, MIDDLE, 8, 1024)  # type: ignore[arg-type]
    assert set(steps.rows) == {(1, 1), (8, 8), (1, 128)}
    assert (speed.row_s, speed.batch_s, speed.prompt_row_s) == pytest.approx((1e-3, 8e-3, 1e-3))
    assert steps.open == set(), "nothing of it stays"
    positions = [work[0].start for work in steps.work[:9]]
    assert positions == list(range(9)), "as decoding goes on"


def test_no_more_is_tried_than_there_is_room_for() -> None:
    steps = Steps(free_tokens=100)
    speed = measure_stage(steps, MIDDLE, 8, 48)  # type: ignore[arg-type]
    assert speed.batch_s is None
    assert max(rows for _, rows in steps.rows) == 48
    tiny = Steps(free_tokens=8)
    assert measure_stage(tiny, MIDDLE, 8, 48).prompt_row_s is None  # type: ignore[arg-type]


def test_a_slow_machine_is_measured_in_a_moment(steps: Steps) -> None:
    """Where one row takes a second, a hundred of them are not waited for."""
    steps.row_s = 1.0
    measure_stage(steps, MIDDLE, 8, 1024)  # type: ignore[arg-type]
    assert sum(rows for _, rows in steps.rows) < 80


def test_a_failure_leaves_nothing_behind() -> None:
    for at in (1, 5, 11, 16):
        steps = Steps(fails_at=at)
        with pytest.raises(DeviceMemoryError):
            measure_stage(steps, MIDDLE, 8, 1024)  # type: ignore[arg-type]
        assert steps.open == set()


@pytest.mark.parametrize("backend", ["numpy", "onnx"])
def test_a_backend_is_probed_by_its_own_executor(backend: str) -> None:
    built: list[tuple[str, str, int]] = []

    def noted(*args: Any, backend: str, options: ExecutorOptions) -> Executor:
        built.append((backend, options.device, options.threads))
        return build_executor(*args, backend=backend, options=options)

    small = speed_probe._Probed(128, 256, 2, 32)
    with (
        mock.patch.object(speed_probe, "build_executor", noted),
        mock.patch.object(speed_probe, "_HOST", small),
        mock.patch.object(speed_probe, "_TINY", replace(small, layers=1)),
    ):
        speed = probe_backend(backend, "cpu", 1)
    assert built == [(backend, "cpu", 1)] * 2
    assert speed.seconds_per_byte > 0
    assert speed.prefill_seconds_per_byte > 0
    assert speed.overhead_s >= 0


def test_a_probe_frees_what_it_made() -> None:
    device = FullDevice()

    def wrapped(*args: Any, **options: Any) -> Executor:
        return device.wrap(build_executor(*args, **options))

    small = speed_probe._Probed(128, 256, 2, 32)
    with (
        mock.patch.object(speed_probe, "build_executor", wrapped),
        mock.patch.object(speed_probe, "_HOST", small),
    ):
        probe_backend("numpy", "cpu", 1)
    assert device.closed == 2


class OneCard:
    """What of a card the measurement looks at."""

    spec = plain_spec(4)
    form = "native"
    head_bytes = 10_000_000

    def layer_bytes(self, layer: int) -> int:
        return 6_500_000


def test_a_layers_time_is_told_from_the_heads_and_the_frames() -> None:
    card: Any = OneCard()
    assert speed_probe.shape_of_card(card) == LayerShape(96, 10_000_000, "native")
    with mock.patch.object(speed_probe, "measure_stage", return_value=StageSpeed(0.032, 0.062, 0.004)):
        last = measure_shard(mock.Mock(), card, Stage(2, 4, 4), 512, 0.002)
        middle = measure_shard(mock.Mock(), card, Stage(1, 3, 4), 512, 0.002)
    assert (last.layer_s, last.batch_layer_s) == pytest.approx((0.01, 0.02)), (
        "two layers, and a head of their size"
    )
    assert (middle.layer_s, middle.batch_layer_s) == pytest.approx((0.015, 0.03))
    assert middle.prefill_layer_s == pytest.approx(0.002)


def test_a_real_stage_is_measured_and_computes_on() -> None:
    spec = plain_spec()
    options = ExecutorOptions(kv_bytes=1 << 22, context_length=64)
    stage = Stage(0, 3, 3)
    executor = build_executor(spec, stage, RandomTensors(spec), backend="numpy", options=options)
    runtime = StageRuntime(executor, is_first=True, is_last=True)
    speed = measure_stage(runtime, stage, spec.hidden, 64)
    assert speed.row_s > 0
    assert speed.batch_s is not None
    assert speed.prompt_row_s is not None
    assert runtime.session_lengths() == {}
    assert np.isfinite(speed.prompt_row_s)
    runtime.close()
