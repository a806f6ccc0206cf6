"""`bench wan`: how fast one model answers from machines that are far apart, plainly and with drafts.

Real processes on an emulated network: the driver on one machine, stages on the others. The arms differ only by a
field of the request, so every prompt is asked of all arms in turn, on the same cluster, in an order that rotates.
Drafts must never change an answer: texts that differ are part of the outcome.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardcompute.bench.report import Say
from shardcompute.bench.wan.cluster import TimedAnswer, WanCluster, WanServing, await_drafters, wan_cluster
from shardcompute.bench.wan.prompts import BenchPrompt, read_prompts, sample_prompts
from shardcompute.core.errors import UsageError
from shardcompute.sim import (
    EmulatedNetwork,
    Emulator,
    initial_conditions,
    load_topology,
    open_network,
    ring_topology,
)

ARMS: Mapping[str, str] = {
    "plain": "off",
    "ngram": "ngram",
    "head": "head",
    "model": "model",
    "auto": "auto",
}
"""Arms, and the drafter that each asks for."""
PARALLEL_ARMS = ("plain", "auto")
_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class WanBench:
    serving: WanServing
    data: Path
    ring_ms: Sequence[float] = (20.0, 80.0, 200.0)
    mbit: float = 100.0
    per_category: int = 8
    """Prompts of each category; 0: all that there are."""
    seed: int = 1
    """By which they are drawn, and what is sampled of answers."""
    tokens: Sequence[int] = (128, 256)
    temperatures: Sequence[float] = (0.0, 0.8)
    streams: Sequence[int] = (1, 4, 8, 16)
    arms: Sequence[str] = ("plain", "ngram", "head", "auto")
    workers: int = 3
    draft_model: str = ""
    emulator: Emulator = Emulator.AUTO

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms:
            raise UsageError(f"no arm is called {', '.join(unknown)!r}", hint=f"use {', '.join(ARMS)}")
        counts = (*self.streams, *self.tokens)
        if not (self.ring_ms and self.streams and self.tokens and self.temperatures) or min(counts) < 1:
            raise UsageError(
                "there is nothing to measure",
                hint="give times to --ring-ms, temperatures to --temperatures, counts to --streams and --tokens",
            )

    @property
    def settings(self) -> list[tuple[int, float]]:
        """Most tokens of an answer and temperature, of everything that is asked."""
        return [(tokens, temperature) for temperature in self.temperatures for tokens in self.tokens]


@dataclass(frozen=True, slots=True)
class Row:
    """One answer. `timings` is what the server said of it, with the names that the API has."""

    ring_ms: float
    arm: str
    streams: int
    max_tokens: int
    temperature: float
    category: str
    prompt: int
    group: int
    """Answers of one group came at the same time; it took `group_s`."""
    group_s: float
    tokens: int
    prompt_tokens: int
    first_s: float
    total_s: float
    text: str
    timings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return float(self.timings.get("decode_s") or self.total_s - self.first_s)

    @property
    def tokens_per_s(self) -> float:
        """After the first token, which belongs to the prompt."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else 0.0

    def number(self, name: str) -> float | None:
        """Something that the server measured; None where it did not say."""
        value = self.timings.get(name)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An answer that differs from the first one to the same prompt."""

    prompt: int
    category: str
    arm: str
    streams: int
    ring_ms: float
    max_tokens: int
    temperature: float
    text: str
    expected: str


@dataclass(frozen=True, slots=True)
class WanOutcome:
    emulator: str
    rows: Sequence[Row]
    mismatches: Sequence[Mismatch]
    stages: Sequence[str]
    drafters: Sequence[str] = ()
    """Which were at work, with how they had fared at the end."""


def run_wan_bench(bench: WanBench, say: Say) -> WanOutcome:
    prompts = sample_prompts(read_prompts(bench.data), bench.per_category, bench.seed)
    with emulated_homes(bench.workers, bench.emulator) as network:
        say(f"starting a cluster on {len(network.machines)} machines ({network.emulator})")
        with wan_cluster(network, _with_drafters(bench)) as cluster:
            if {"head", "auto"}.intersection(bench.arms):
                await_drafters(cluster)
            stages = cluster.stage_machines()
            rows: list[Row] = []
            for ring_ms in bench.ring_ms:
                topology = ring_topology(len(network.machines), ring_ms, bench.mbit)
                network.impose(initial_conditions(topology, network.machines))
                rows += _measure_ring(bench, cluster, prompts, ring_ms, say)
            drafters = [each["text"] for each in cluster.drafters()]
    return WanOutcome(str(network.emulator), rows, find_mismatches(rows), stages, drafters)


def _with_drafters(bench: WanBench) -> WanServing:
    """Drafters that only work where the cluster was started with them."""
    if not bench.draft_model:
        return bench.serving
    return replace(bench.serving, options=(*bench.serving.options, "--draft-model", bench.draft_model))


@contextlib.contextmanager
def emulated_homes(workers: int, emulator: Emulator) -> Iterator[EmulatedNetwork]:
    """Machines `driver`, `stage-1`, …, on one LAN for now."""
    machines = ["driver", *(f"stage-{number}" for number in range(1, workers + 1))]
    with open_network(load_topology("lan"), machines, emulator) as network:
        yield network


def find_mismatches(rows: Sequence[Row]) -> list[Mismatch]:
    """Answers to one prompt with one seed are equal whatever the arm, the company and the distance."""
    expected: dict[tuple[int, int, float], str] = {}
    mismatches = []
    for row in rows:
        text = expected.setdefault((row.prompt, row.max_tokens, row.temperature), row.text)
        if text != row.text:
            mismatches.append(
                Mismatch(
                    row.prompt,
                    row.category,
                    row.arm,
                    row.streams,
                    row.ring_ms,
                    row.max_tokens,
                    row.temperature,
                    row.text,
                    text,
                )
            )
    return mismatches


@dataclass(frozen=True, slots=True)
class _Round:
    """What is asked in one part of the bench: at this distance, so many at once, with these settings."""

    ring_ms: float
    streams: int
    max_tokens: int
    temperature: float
    seed: int

    def body(self, prompt: BenchPrompt, arm: str) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "speculation": {"drafter": ARMS[arm]},
            "cache_salt": arm,
        }

    def __str__(self) -> str:
        return f"{self.ring_ms:g} ms, {self.max_tokens} tokens, temperature {self.temperature:g}"


def _measure_ring(
    bench: WanBench, cluster: WanCluster, prompts: Sequence[BenchPrompt], ring_ms: float, say: Say
) -> list[Row]:
    # The first frames after a change of the network pay for windows and estimates of before.
    warm = _Round(ring_ms, 1, _WARM_TOKENS, 0.0, bench.seed)
    for arm in bench.arms:
        cluster.ask(warm.body(prompts[0], arm))
    rows: list[Row] = []
    for streams in sorted(bench.streams):
        for max_tokens, temperature in bench.settings:
            asked = _Round(ring_ms, streams, max_tokens, temperature, bench.seed)
            if streams == 1:
                rows += _measure_prompts(bench, cluster, prompts, asked, say)
            else:
                rows += _measure_streams(bench, cluster, prompts, asked, say)
    return rows


def _measure_prompts(
    bench: WanBench, cluster: WanCluster, prompts: Sequence[BenchPrompt], asked: _Round, say: Say
) -> list[Row]:
    rows: list[Row] = []
    for turn, prompt in enumerate(prompts):
        say(f"{asked}: prompt {turn + 1} of {len(prompts)} ({prompt.category})")
        for arm in _rotated(bench.arms, turn):
            answers, elapsed_s = cluster.ask_all([asked.body(prompt, arm)])
            rows += _rows(asked, arm, [prompt], answers, elapsed_s, group=turn)
    return rows


def _measure_streams(
    bench: WanBench, cluster: WanCluster, prompts: Sequence[BenchPrompt], asked: _Round, say: Say
) -> list[Row]:
    """Every prompt once, so many at a time; the last group starts again from the beginning."""
    rows: list[Row] = []
    count = asked.streams
    arms = [arm for arm in PARALLEL_ARMS if arm in bench.arms]
    for group in range(-(-len(prompts) // count)):
        chosen = [prompts[(group * count + index) % len(prompts)] for index in range(count)]
        for arm in _rotated(arms, group):
            say(f"{asked}: {count} streams, {arm}")
            answers, elapsed_s = cluster.ask_all([asked.body(prompt, arm) for prompt in chosen])
            rows += _rows(asked, arm, chosen, answers, elapsed_s, group=group)
    return rows


def _rows(
    asked: _Round,
    arm: str,
    prompts: Sequence[BenchPrompt],
    answers: Sequence[TimedAnswer],
    elapsed_s: float,
    *,
    group: int,
) -> list[Row]:
    return [
        Row(
            ring_ms=asked.ring_ms,
            arm=arm,
            streams=asked.streams,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            category=prompt.category,
            prompt=prompt.id,
            group=group,
            group_s=elapsed_s,
            tokens=answer.tokens,
            prompt_tokens=answer.prompt_tokens,
            first_s=answer.first_s,
            total_s=answer.last_s,
            text=answer.text,
            timings=answer.timings,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _rotated(arms: Sequence[str], turn: int) -> list[str]:
    """Every arm is first as often as any other."""
    start = turn % len(arms) if arms else 0
    return [*arms[start:], *arms[:start]]
