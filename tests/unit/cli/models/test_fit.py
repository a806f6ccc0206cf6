"""Whether a model fits, what is missing, how fast it would be: known before anything is fetched."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.backends.devices import ComputeDevice
from shardcompute.cli.cluster.text import describe_fit
from shardcompute.cli.models.fit import Fit, fit_here
from shardcompute.control.sizes import sizes_of
from shardcompute.node.admin.views import PlannedChain, PlannedStage, PlanView
from shardcompute.node.worker.speed_probe import BackendSpeed
from support.models.plain_model import plain_model

from ..cluster_lab import Lab, say_running

Cli = Callable[..., Any]
GIB = 1 << 30
HOST = ComputeDevice(
    name="cpu",
    backend="onnx",
    label="Plain CPU",
    total_bytes=16 * GIB,
    free_bytes=8 * GIB,
    is_host_memory=True,
)
GPU = ComputeDevice(
    name="cuda:0", backend="torch", label="Fast GPU", total_bytes=24 * GIB, free_bytes=20 * GIB
)


def rows_of(told: str) -> dict[str, str]:
    return {line[:15].strip(): line[15:].strip() for line in told.splitlines()}


def test_a_model_that_nobody_fetched_is_shown_offline(cli: Cli, machine: list[str]) -> None:
    shown = cli("show", "qwen3:1.7b")
    assert shown.exit_code == 0
    rows = rows_of(shown.stdout)
    assert rows["reference"] == "Qwen/Qwen3-1.7B-GGUF:Q8_0"
    assert rows["not here"].endswith("nothing was fetched")
    assert rows["parameters"] == "1,720,574,976"
    assert rows["licence"] == "Apache-2.0"
    assert rows["made for"] == "thinking, tools"
    assert rows["this machine"].startswith("fits now: takes 4.8 GiB of ")
    assert rows["this machine"].endswith("tok/s")
    assert "cluster" not in rows
    assert cli("show", "qwen3:4b").exit_code == 0
    assert machine == ["cpu"], "what was measured is remembered"


def test_what_is_missing_is_said(cli: Cli, machine: list[str]) -> None:
    told = rows_of(cli("show", "qwen3:32b").stdout)["this machine"]
    assert told.startswith("needs ")
    assert " GiB more: takes " in told
    assert machine == [], "nothing is measured for what does not fit"
    found = json.loads(cli("show", "qwen3:32b", "--json").stdout)
    fit = found["fit"]
    assert fit["missing_bytes"] == fit["needed_bytes"] - fit["free_bytes"] > 0
    assert fit["tokens_per_s"] is None
    assert found["fit_in_cluster"] is None
    assert found["is_fetched"] is False
    assert "sized" not in found


def test_the_cluster_that_runs_here_is_asked(cli: Cli, home: Path, lab: Lab, recognised: None) -> None:
    say_running(home / "cluster")
    assert rows_of(cli("show", "qwen3:1.7b").stdout)["cluster"].startswith("needs ")
    planned = cli("plan", "qwen3:1.7b")
    assert planned.exit_code == 7
    assert planned.stdout.startswith("needs ")
    assert "Qwen/Qwen3-1.7B-GGUF cannot be served" in planned.stdout
    assert cli("plan", "org/tiny", "--weights", "int8").stdout.startswith("fits now on 3 machines; expect ")


def test_the_best_device_that_has_the_memory_is_taken(tmp_path: Path) -> None:
    model = plain_model()
    needed = sizes_of(model).on("torch/cuda").total_bytes
    speed = BackendSpeed(1e-9, 1e-9, 0.001)
    fit = fit_here(model, tmp_path, devices=(GPU, HOST), measure=lambda *_: speed)
    work = sizes_of(model).work_bytes(0, model.layer_count)
    assert fit == Fit("Fast GPU", needed, fit.free_bytes, 1 / (0.001 + 1e-9 * work))
    full = replace(GPU, free_bytes=0)
    assert fit_here(model, tmp_path, devices=(full, HOST), measure=lambda *_: speed).device == "Plain CPU"


def test_a_gpu_that_no_worker_has_measured_has_no_speed(tmp_path: Path) -> None:
    fit = fit_here(plain_model(), tmp_path, devices=(GPU, HOST))
    assert fit.tokens_per_s is None
    assert fit.words.startswith("fits now: takes ")
    assert "expect" not in fit.words


@pytest.mark.parametrize(
    ("chain", "replaces", "told"),
    [
        (
            PlannedChain(
                is_possible=True,
                reasons=(),
                stages=tuple(
                    PlannedStage(node=node, name=node, start=0, stop=1, memory_bytes=1, predicted_s=0.1)
                    for node in ("a", "b")
                ),
                predicted_tokens_per_s_one_stream=31.04,
            ),
            (),
            "fits now on 2 machines; expect 31.0 tok/s",
        ),
        (
            PlannedChain(is_possible=False, reasons=("too small",), missing_bytes=4 * GIB),
            (),
            "needs 4.0 GiB more memory than these machines have free",
        ),
        (
            PlannedChain(is_possible=False, reasons=("too small",), missing_bytes=4 * GIB),
            ("org/old",),
            "fits if org/old gives way",
        ),
        (PlannedChain(is_possible=False, reasons=("no workers",)), (), "does not fit: no workers"),
    ],
)
def test_plans_in_a_line(chain: PlannedChain, replaces: tuple[str, ...], told: str) -> None:
    plan = PlanView(
        model="m", form="native", layer_count=2, memory_bytes=0, text="", chains=(chain,), replaces=replaces
    )
    assert describe_fit(plan) == told
