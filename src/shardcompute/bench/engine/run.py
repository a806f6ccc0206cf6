"""`bench engine`: decode and prefill speed of every weight form, next to `transformers` and llama.cpp in the same run.

Equal bits are compared on models of random weights (`run_random_bench`): the same file for every arm.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardcompute.backends.llamacpp.library import INSTALL_HINT, is_installed
from shardcompute.bench.engine.random_gguf import LlamaShape, transformers_config, write_random_gguf
from shardcompute.bench.engine.stopwatch import Spent
from shardcompute.bench.report import Result, Say, median_ratio
from shardcompute.core.closing import Closing
from shardcompute.core.errors import BackendError

TRANSFORMERS = "transformers float32"
PLAIN = "llama.cpp"
OURS_BY_LLAMACPP = "llamacpp"
_BASELINES = {TRANSFORMERS: "transformers", PLAIN: "llamacpp"}
_CONTEXT = 700
_STREAM_TOKENS = 768


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
    with_llamacpp: bool = True
    config_path: str = ""
    """Of the same shape for `transformers`, where the model's weights are random."""
    wants_all: bool = False
    """Of a prompt, the logits of all rows (see `Engine.prefill`)."""


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
        return float(self._ask(command)["value"])

    def time(self, **command: Any) -> Spent:
        answer = self._ask(command)
        return Spent(answer["value"], answer["processor"])

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._process.stdin is None:
            raise BackendError(f"the arm {self.name} cannot be asked")
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

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


def run_random_bench(
    bench: EngineBench, shape: LlamaShape, types: Sequence[str], folder: Path, say: Say
) -> list[Result]:
    """The same of models of random weights, one for each type of number; `model_path` is of no matter."""
    results: list[Result] = []
    for dtype in types:
        say(f"writing a model in {dtype}")
        path = write_random_gguf(folder / f"{dtype}.gguf", shape, dtype)
        config = folder / f"{dtype}.json"
        config.write_text(json.dumps(transformers_config(shape)), encoding="utf-8")
        is_cut = shape.model_layers > shape.layers
        whole = replace(bench, model_path=str(path), config_path=str(config), wants_all=is_cut)
        found = run_engine_bench(whole, say)
        found.append(Result("file", path.stat().st_size / 2**20, "MiB", {"engine": "all"}))
        layers = f"layers of {shape.model_layers or shape.layers}, each whole"
        found.append(Result("depth", shape.layers, layers, {"engine": "all"}))
        results += [replace(each, labels={"type": dtype, **each.labels}) for each in found]
        path.unlink()
    return results


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
    sessions = max(bench.batches)
    # Room for as many tokens in every arm; memory is compared, too.
    room = ["--context", str(_CONTEXT), "--kv-tokens", str(sessions * _STREAM_TOKENS)]
    arms = []
    if bench.with_transformers and importlib.util.find_spec("transformers") is not None:
        say(f"loading {TRANSFORMERS}, {threads} threads")
        source = ["--model", bench.config_path] if bench.config_path else []
        arms.append(Arm(TRANSFORMERS, ["--engine", "transformers", *common, *source]))
    elif bench.with_transformers:
        say("transformers is not installed and is left out: pip install 'shardcompute[torch]'")
    for form in bench.forms:
        say(f"loading {form}, {threads} threads")
        arms.append(Arm(form, ["--engine", "ours", "--form", form, *common, *room]))
    if bench.with_llamacpp and not bench.model_path.endswith(".gguf"):
        say("llama.cpp runs GGUF files only and is left out")
    elif bench.with_llamacpp and not is_installed():
        say(f"llama.cpp is not installed and is left out: {INSTALL_HINT}")
    elif bench.with_llamacpp:
        say(f"loading llama.cpp, {threads} threads")
        try:
            arms.append(Arm(OURS_BY_LLAMACPP, ["--engine", "ours", "--backend", "llamacpp", *common, *room]))
        except BackendError as error:
            # It refuses types whose rows it cannot give equal bits; plain llama.cpp does not ask.
            say(f"{OURS_BY_LLAMACPP} is left out: {error.message}")
        plain = ["--engine", "llama.cpp", "--sessions", str(sessions), "--context", str(_STREAM_TOKENS)]
        arms.append(Arm(PLAIN, [*plain, *common]))
    return arms


def _measure(bench: EngineBench, arms: Sequence[Arm], threads: int, say: Say) -> list[Result]:
    prompt = {"operation": "prefill", "tokens": bench.prefill_tokens, "wants_all": bench.wants_all}
    cases: list[tuple[str, int, dict[str, Any]]] = [("prefill", bench.prefill_tokens, prompt)]
    for batch in bench.batches:
        command = {"operation": "decode", "batch": batch, "past": bench.past, "steps": bench.steps}
        cases.append(("decode", batch, command))
    results = []
    for metric, size, command in cases:
        spent: dict[str, list[Spent]] = {arm.name: [] for arm in arms}
        tokens = size if metric == "prefill" else size * bench.steps
        for round_number in range(bench.rounds):
            say(f"{threads} threads, {metric} {size}: round {round_number + 1} of {bench.rounds}")
            for arm in arms:
                spent[arm.name].append(arm.time(**command))
        for arm in arms:
            results += _speed_results(metric, size, threads, arm.name, tokens, spent)
    for arm in arms:
        labels = {"engine": arm.name, "threads": threads}
        results.append(Result("resident_memory", arm.ask(operation="memory"), "MiB", labels))
        results.append(Result("peak_memory", arm.ask(operation="peak_memory"), "MiB", labels))
    return results


def _speed_results(
    metric: str, size: int, threads: int, name: str, tokens: int, spent: dict[str, list[Spent]]
) -> list[Result]:
    """Speeds by the clock; with one thread also ratios by the least processor time of all rounds."""
    label = "batch" if metric == "decode" else "tokens"
    labels = {"engine": name, "threads": threads, label: size}
    speeds = {arm: [tokens / each.clock_s for each in rounds] for arm, rounds in spent.items()}
    least = {arm: min(each.processor_s for each in rounds) for arm, rounds in spent.items()}
    results = [Result(metric, statistics.median(speeds[name]), "tok/s", labels)]
    for baseline, short in _BASELINES.items():
        if baseline in speeds and name not in _BASELINES:
            ratio = median_ratio(speeds[name], speeds[baseline])
            results.append(Result(f"{metric}_vs_{short}", ratio, "ratio", labels))
            if threads == 1:
                ratio = least[baseline] / least[name]
                results.append(Result(f"{metric}_vs_{short}_by_processor_time", ratio, "ratio", labels))
    return results
