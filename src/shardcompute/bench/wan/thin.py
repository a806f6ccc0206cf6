"""`bench wan --thin`: a long prompt over thin uplinks, with activations sent exactly against `--wire auto`.

Both arms are clusters of their own on the same machines, asked in turn.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardcompute.bench.report import Result, Say, median_ratio
from shardcompute.bench.wan.cluster import WanCluster, WanServing, wan_cluster
from shardcompute.bench.wan.prompts import read_prompts
from shardcompute.bench.wan.run import emulated_homes
from shardcompute.core.errors import UsageError
from shardcompute.sim import Emulator, initial_conditions, load_topology

WIRES = ("exact", "auto")
_EVERYTHING = 1 << 20


@dataclass(frozen=True, slots=True)
class ThinBench:
    serving: WanServing
    data: Path
    prompt_tokens: int = 2000
    tokens: int = 8
    rounds: int = 3
    workers: int = 3
    topology: str = "thin-uplink"
    emulator: Emulator = Emulator.AUTO


def run_thin_bench(bench: ThinBench, say: Say) -> list[Result]:
    text = "\n\n".join(prompt.text for prompt in read_prompts(bench.data, most_chars=_EVERYTHING))
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(emulated_homes(bench.workers, bench.emulator))
        clusters: dict[str, WanCluster] = {}
        for wire in WIRES:
            say(f"starting a cluster with --wire {wire} ({network.emulator})")
            serving = replace(bench.serving, options=(*bench.serving.options, "--wire", wire))
            clusters[wire] = stack.enter_context(wan_cluster(network, serving))
        ids = clusters[WIRES[0]].tokenize(text)
        if len(ids) < bench.prompt_tokens * (bench.rounds + 1):
            raise UsageError(
                f"{bench.data} has text for {len(ids)} tokens, not for {bench.rounds + 1} prompts",
                hint="give more text with --data",
            )
        network.impose(initial_conditions(load_topology(bench.topology), network.machines))
        return _measure(bench, clusters, ids, say)


def _measure(bench: ThinBench, clusters: dict[str, WanCluster], ids: Sequence[int], say: Say) -> list[Result]:
    first_s: dict[str, list[float]] = {wire: [] for wire in WIRES}
    moved: dict[str, list[float]] = {wire: [] for wire in WIRES}
    same = 0
    # The first round is for windows and estimates; prompts differ, so that none is remembered.
    for number in range(bench.rounds + 1):
        start = number * bench.prompt_tokens
        prompt = list(ids[start : start + bench.prompt_tokens])
        texts = set()
        for wire in WIRES if number % 2 else reversed(WIRES):
            say(f"--wire {wire}: {'warming up' if number == 0 else f'round {number} of {bench.rounds}'}")
            body = {"prompt": prompt, "max_tokens": bench.tokens, "speculation": {"drafter": "off"}}
            answer = clusters[wire].ask(body)
            texts.add(answer.text)
            if number:
                first_s[wire].append(answer.first_s)
                moved[wire].append(float(answer.timings.get("bytes_per_token") or 0.0))
        same += number > 0 and len(texts) == 1
    results = []
    for wire in WIRES:
        labels = {"wire": wire, "topology": bench.topology}
        results += [
            Result(f"round_{number}", seconds, "s", labels)
            for number, seconds in enumerate(first_s[wire], start=1)
        ]
        results.append(Result("first_token", statistics.median(first_s[wire]), "s", labels))
        results.append(Result("bytes_per_token", statistics.median(moved[wire]), "bytes", labels))
    labels = {"wire": "auto", "topology": bench.topology}
    ratio = median_ratio(first_s["exact"], first_s["auto"])
    results.append(Result("exact_vs_auto", ratio, "ratio", labels))
    # `auto` may round: this says how often that showed.
    results.append(Result("same_text", same / bench.rounds, "fraction", labels))
    return results
