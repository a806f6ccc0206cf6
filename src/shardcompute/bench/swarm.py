"""`bench swarm`: two workers against one process on the same machine, in turns, as a client sees them."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcompute.bench.report import Result, Say, median_ratio
from shardcompute.bench.servers import Server, StreamedReply, cluster_arguments, serving

_PARTS = ("compute_s", "stage_queue_s", "codec_s", "wire_s")


@dataclass(frozen=True, slots=True)
class SwarmBench:
    model_path: str
    form: str = "int8"
    workers: int = 2
    streams: Sequence[int] = (1, 8, 32)
    prompt_tokens: int = 32
    tokens: int = 48
    rounds: int = 4


def run_swarm_bench(bench: SwarmBench, say: Say) -> list[Result]:
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        say("starting one process")
        single = stack.enter_context(
            serving("one process", bench.model_path, ["--local", "--threads", "1", "--weights", bench.form])
        )
        say(f"starting {bench.workers} workers")
        arguments = cluster_arguments(bench.workers, bench.form, "--prefer", "throughput")
        swarm = stack.enter_context(serving("swarm", bench.model_path, arguments))
        used = _stages(swarm.state())
        results.append(Result("stages", len(used), "stages", {"arm": "swarm"}))
        for server in (single, swarm):
            server.stream(_prompt(0, bench), 8)
        for count in bench.streams:
            results += _compare(bench, [single, swarm], count, say)
        results += _hop(swarm.state())
    return results


def _compare(bench: SwarmBench, arms: Sequence[Server], count: int, say: Say) -> list[Result]:
    speeds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    seen: dict[str, list[StreamedReply]] = {arm.name: [] for arm in arms}
    for number in range(bench.rounds):
        for arm in arms:
            say(f"{count} streams, {arm.name}: round {number + 1} of {bench.rounds}")
            prompts = [_prompt(number * 100 + i, bench) for i in range(count)]
            streams, elapsed = arm.streams(prompts, bench.tokens)
            seen[arm.name] += streams
            if count == 1:
                # The speed of one stream is that of its decoding; the prompt is counted by itself.
                speeds[arm.name].append(1 / statistics.mean(streams[0].gaps_s))
            else:
                speeds[arm.name].append(count * bench.tokens / elapsed)
    results = []
    for arm in arms:
        labels = {"arm": arm.name, "streams": count}
        gaps = [gap for stream in seen[arm.name] for gap in stream.gaps_s]
        results += [
            Result("throughput", statistics.median(speeds[arm.name]), "tok/s", labels),
            Result("first_token", statistics.median(s.first_s for s in seen[arm.name]), "s", labels),
            Result("inter_token_p50", float(np.quantile(gaps, 0.5)), "s", labels),
            Result("inter_token_p99", float(np.quantile(gaps, 0.99)), "s", labels),
        ]
    results += [_part_of_a_step(part, seen[arms[-1].name], count) for part in _PARTS]
    first, second = (arm.name for arm in arms)
    ratio = median_ratio(speeds[second], speeds[first])
    results.append(Result("swarm_vs_one_process", ratio, "ratio", {"arm": second, "streams": count}))
    texts = [[stream.text for stream in seen[arm.name]] for arm in arms]
    results.append(
        Result("same_text", float(texts[0] == texts[1]), "fraction", {"arm": second, "streams": count})
    )
    return results


def _part_of_a_step(part: str, streams: Sequence[StreamedReply], count: int) -> Result:
    """Where the time of a frame's way round the chain went, in the mean over answers."""
    seconds = statistics.mean(stream.timings.get(part, 0.0) for stream in streams)
    return Result(f"step_{part.removesuffix('_s')}", seconds, "s", {"arm": "swarm", "streams": count})


def _stages(state: dict[str, Any]) -> list[dict[str, Any]]:
    chains = state.get("chains", [])
    stages: list[dict[str, Any]] = chains[0]["stages"] if chains else []
    return stages


def _hop(state: dict[str, Any]) -> list[Result]:
    """Where a step's time went on each stage, of the newest step."""
    results = []
    for index, stage in enumerate(_stages(state)):
        timing = stage.get("timing") or {}
        for part in ("queue_s", "compute_s", "codec_s"):
            if part in timing:
                labels = {"arm": "swarm", "stage": index}
                results.append(Result(f"stage_{part.removesuffix('_s')}", timing[part], "s", labels))
        if "received_bytes" in timing:
            labels = {"arm": "swarm", "stage": index}
            results.append(Result("received_per_step", timing["received_bytes"], "bytes", labels))
    return results


def _prompt(seed: int, bench: SwarmBench) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(100, 40_000, bench.prompt_tokens)]
