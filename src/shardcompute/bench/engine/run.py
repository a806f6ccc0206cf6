"""`bench engine`: decode and prefill speed of every weight form, next to `transformers` in the same run."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardcompute.bench.report import Result, Say, median_ratio
from shardcompute.core.closing import Closing
from shardcompute.core.errors import BackendError

TRANSFORMERS = "transformers float32"


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What to measure. `rounds` times, every arm in turn."""

    model_path: str
    forms: Sequence[str] = ("float32", "int8", "int4", "native")
    threads: Sequence[int] = (1, 2)
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    prefill_tokens: int = 512
    past: int = 64
    steps: int = 16
    rounds: int = 5
    with_transformers: bool = True


class Arm(Closing):
    """A process that runs one engine; see `bench.engine.arm`."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        command = [sys.executable, "-m", "shardcompute.bench.engine.arm", *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._read()

    def ask(self, **command: Any) -> float:
        if self._process.stdin is None:
            raise BackendError(f"the arm {self.name} cannot be asked")
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return float(self._read()["value"])

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            _, errors = self._process.communicate()
            last = errors.strip().splitlines()[-1:] or ["it said nothing"]
            raise BackendError(f"the arm {self.name} ended early: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


def run_engine_bench(bench: EngineBench, say: Say) -> list[Result]:
    results: list[Result] = []
    for threads in bench.threads:
        arms = _open_arms(bench, threads, say)
        try:
            results += _measure(bench, arms, threads, say)
        finally:
            for arm in arms:
                arm.close()
    return results


def _open_arms(bench: EngineBench, threads: int, say: Say) -> list[Arm]:
    common = ["--model", bench.model_path, "--threads", str(threads)]
    arms = []
    if bench.with_transformers and importlib.util.find_spec("transformers") is not None:
        say(f"loading {TRANSFORMERS}, {threads} threads")
        arms.append(Arm(TRANSFORMERS, ["--engine", "transformers", *common]))
    elif bench.with_transformers:
        say("transformers is not installed and is left out: pip install 'shardcompute[torch]'")
    for form in bench.forms:
        say(f"loading {form}, {threads} threads")
        arms.append(Arm(form, ["--engine", "ours", "--form", form, *common]))
    return arms


def _measure(bench: EngineBench, arms: Sequence[Arm], threads: int, say: Say) -> list[Result]:
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("prefill", bench.prefill_tokens, {"operation": "prefill", "tokens": bench.prefill_tokens})
    ]
    for batch in bench.batches:
        command = {"operation": "decode", "batch": batch, "past": bench.past, "steps": bench.steps}
        cases.append(("decode", batch, command))
    results = []
    for metric, size, command in cases:
        speeds: dict[str, list[float]] = {arm.name: [] for arm in arms}
        tokens = size if metric == "prefill" else size * bench.steps
        for round_number in range(bench.rounds):
            say(f"{threads} threads, {metric} {size}: round {round_number + 1} of {bench.rounds}")
            for arm in arms:
                speeds[arm.name].append(tokens / arm.ask(**command))
        for arm in arms:
            results += _speed_results(metric, size, threads, arm.name, speeds)
    for arm in arms:
        labels = {"engine": arm.name, "threads": threads}
        results.append(Result("resident_memory", arm.ask(operation="memory"), "MiB", labels))
    return results


def _speed_results(
    metric: str, size: int, threads: int, name: str, speeds: dict[str, list[float]]
) -> list[Result]:
    label = "batch" if metric == "decode" else "tokens"
    labels = {"engine": name, "threads": threads, label: size}
    results = [Result(metric, statistics.median(speeds[name]), "tok/s", labels)]
    if TRANSFORMERS in speeds and name != TRANSFORMERS:
        ratio = median_ratio(speeds[name], speeds[TRANSFORMERS])
        results.append(Result(f"{metric}_vs_transformers", ratio, "ratio", labels))
    return results
