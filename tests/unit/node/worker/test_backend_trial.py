"""Which backend computes a model on a CPU: measured once, remembered, and never a reason to fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.backends.cpu_choice import CpuBackendChoice, CpuSpeed
from shardcompute.backends.devices import host_device
from shardcompute.backends.llamacpp.library import installed_version
from shardcompute.bench.engine.random_gguf import LlamaShape, write_random_gguf
from shardcompute.core.errors import BackendError
from shardcompute.core.settings import Settings, load_settings
from shardcompute.models.spec import Stage
from shardcompute.node.worker import backend_trial
from shardcompute.node.worker.backend_trial import (
    TriedSpeeds,
    choose_cpu_backend,
    remembered_choices,
    try_backends,
)
from shardcompute.node.worker.speed_probe import StageSpeed
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama

SHAPE = LlamaShape(5, 128, 256, 4, 2, 320)
SLOW, FAST = CpuSpeed(0.02, 0.08, 0.003), CpuSpeed(0.01, 0.05, 0.002)
NOW_S = 1_800_000_000.0


class FakeTrial:
    """Says what it was told to, and counts."""

    def __init__(self, onnx: CpuSpeed, llamacpp: CpuSpeed) -> None:
        self.speeds = {"onnx": onnx, "llamacpp": llamacpp}
        self.is_steady = True
        self.calls = 0

    def __call__(self, checkpoint: Checkpoint, threads: int) -> TriedSpeeds:
        self.calls += 1
        return TriedSpeeds(self.speeds, self.is_steady)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(load_settings(), data_dir=tmp_path, cpu_backend="auto")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_trial, "is_usable", lambda: True)


def opened(folder: Path, dtype: str = "Q8_0", architecture: str = "llama") -> Checkpoint:
    path = write_random_gguf(folder / f"{architecture}-{dtype}.gguf", SHAPE, dtype, architecture=architecture)
    return open_checkpoint(resolve(parse_reference(str(path)), load_settings()))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    with opened(tmp_path) as checkpoint:
        yield checkpoint


def choose(
    checkpoint: Checkpoint, settings: Settings, trial: FakeTrial, *, now_s: float = NOW_S, threads: int = 1
) -> CpuBackendChoice:
    return choose_cpu_backend(
        checkpoint,
        "native",
        settings=settings,
        device=host_device(),
        threads=threads,
        trial=trial,
        clock=lambda: now_s,
    )


@pytest.mark.parametrize(
    ("trial", "chosen"), [(FakeTrial(SLOW, FAST), "llamacpp"), (FakeTrial(FAST, SLOW), "onnx")]
)
def test_what_was_measured_decides_and_is_remembered(
    checkpoint: Checkpoint, settings: Settings, trial: FakeTrial, chosen: str
) -> None:
    first = choose(checkpoint, settings, trial)
    assert first.backend == chosen
    assert "eight sessions" in first.reason
    # Without another trial, the same choice for the same reason.
    assert choose(checkpoint, settings, FakeTrial(FAST, FAST), now_s=NOW_S + 86_400) == first
    assert remembered_choices(host_device(), 1, settings.data_dir) == [(checkpoint.name, first)]
    assert not remembered_choices(host_device(), 2, settings.data_dir)


def test_another_number_of_threads_another_form_and_a_month_are_tried_anew(
    checkpoint: Checkpoint, settings: Settings, tmp_path: Path
) -> None:
    trial = FakeTrial(SLOW, FAST)
    choose(checkpoint, settings, trial)
    choose(checkpoint, settings, trial, threads=2)
    assert trial.calls == 2
    with opened(tmp_path, "Q4_0") as other:
        choose(other, settings, trial)
    assert trial.calls == 3
    choose(checkpoint, settings, trial, now_s=NOW_S + 40 * 86_400)
    assert trial.calls == 4


def test_a_trial_that_was_disturbed_is_used_and_not_remembered(
    checkpoint: Checkpoint, settings: Settings
) -> None:
    disturbed = FakeTrial(SLOW, FAST)
    disturbed.is_steady = False
    assert choose(checkpoint, settings, disturbed).backend == "llamacpp"
    assert choose(checkpoint, settings, FakeTrial(FAST, SLOW)).backend == "onnx"


def test_what_cannot_be_compared_is_settled_without_a_trial(
    checkpoint: Checkpoint, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = FakeTrial(SLOW, FAST)
    with open_checkpoint(resolve(parse_reference(str(save_tiny_llama(tmp_path / "tiny"))), settings)) as tiny:
        assert choose(tiny, settings, trial).backend == "onnx"
    with opened(tmp_path, architecture="smollm3") as uncut:
        assert choose(uncut, settings, trial).backend == "onnx"
    with opened(tmp_path, architecture="internlm2") as foreign:
        choice = choose(foreign, settings, trial)
        assert (choice.backend, choice.reason) == ("llamacpp", "nothing else here can run this architecture")
    assert choose(checkpoint, replace(settings, cpu_backend="onnx"), trial).backend == "onnx"
    assert choose(checkpoint, replace(settings, cpu_backend="llamacpp"), trial).backend == "llamacpp"
    monkeypatch.setattr(backend_trial, "is_usable", lambda: False)
    assert "not installed" in choose(checkpoint, settings, trial).reason
    assert trial.calls == 0


def test_a_trial_that_fails_leaves_onnx_runtime(checkpoint: Checkpoint, settings: Settings) -> None:
    def fail(checkpoint: Checkpoint, threads: int) -> TriedSpeeds:
        raise BackendError("its kernels give other bits here")

    choice = choose_cpu_backend(
        checkpoint, "native", settings=settings, device=host_device(), threads=1, trial=fail
    )
    assert choice.backend == "onnx"
    assert "other bits" in choice.reason


@pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")
def test_a_real_trial_measures_both(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCOMPUTE_HOME", str(tmp_path))
    speeds = try_backends(checkpoint, 1).speeds
    assert set(speeds) == {"onnx", "llamacpp"}
    for speed in speeds.values():
        assert speed.row_s > 0
        assert speed.batch_s > 0
        assert speed.prompt_row_s > 0


@pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize(("tried_bytes", "start"), [(1 << 30, 0), (320_000, 3), (1, 4)])
def test_a_small_model_is_tried_whole_and_a_larger_one_from_its_end(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried_bytes: int, start: int
) -> None:
    """Never a stage from the middle, which llama.cpp computes slower than the same layers at the end."""
    monkeypatch.setenv("SHARDCOMPUTE_HOME", str(tmp_path))
    monkeypatch.setattr(backend_trial, "_TRIED_BYTES", tried_bytes)
    stages = []

    def fixed(runtime: StageRuntime, stage: Stage, hidden: int, rows: int) -> StageSpeed:
        stages.append(stage)
        return StageSpeed(1.0, 2.0, 0.5)

    monkeypatch.setattr(backend_trial, "measure_stage", fixed)
    speed = try_backends(checkpoint, 1).speeds["onnx"]
    assert set(stages) == {Stage(start, 5, 5)}
    times = 5 / (5 - start)
    assert speed.prompt_row_s == pytest.approx(0.5 * times)
    # The head is computed once, however many layers there are.
    assert 1.0 <= speed.row_s <= times
    assert (speed.row_s < times) == (start > 0)
    assert speed.batch_s == pytest.approx(2 * speed.row_s)


@pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize("architecture", ["qwen3moe", "llama"])
def test_sparse_models_are_tried_as_any_other(tmp_path: Path, settings: Settings, architecture: str) -> None:
    shape = replace(SHAPE, intermediate=64, experts=4, per_token=2, architecture=architecture, head_size=32)
    path = write_random_gguf(tmp_path / "sparse.gguf", shape, "Q8_0")
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as sparse:
        speeds = try_backends(sparse, 1).speeds
        assert all(each.row_s > 0 and each.prompt_row_s > 0 for each in speeds.values())
        trial = FakeTrial(SLOW, FAST)
        assert choose(sparse, settings, trial).backend == "llamacpp"
        assert trial.calls == 1
