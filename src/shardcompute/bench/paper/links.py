"""Six workers by batch and link: one model in six stages on an emulated network, asked by so many at once.

Tokens a second of all streams together, as a client on the driver's machine sees them, after the first token of each.
Every link is measured in every round, in an order that rotates; drafts are off, as in the paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.bench.report import Result, Say
from shardcompute.bench.wan.cluster import TimedAnswer, WanCluster, WanServing, wan_cluster
from shardcompute.bench.wan.run import emulated_homes
from shardcompute.sim import Emulator, initial_conditions, ring_topology

_VOCABULARY = (100, 40_000)


@dataclass(frozen=True, slots=True)
class PaperLink:
    """Between any two machines."""

    mbit: float
    rtt_ms: float

    @property
    def told(self) -> str:
        rate = f"{self.mbit / 1000:g} Gbit/s" if self.mbit >= 1000 else f"{self.mbit:g} Mbit/s"
        return f"{rate}, {self.rtt_ms:g} ms"


PAPER_LINKS = (PaperLink(1000, 5), PaperLink(100, 5), PaperLink(1000, 100), PaperLink(100, 100))


@dataclass(frozen=True, slots=True)
class LinkBench:
    serving: WanServing
    links: Sequence[PaperLink] = PAPER_LINKS
    batches: Sequence[int] = (1, 8, 32)
    workers: int = 6
    prompt_tokens: int = 16
    tokens: int = 24
    rounds: int = 2
    emulator: Emulator = Emulator.AUTO


def run_links(bench: LinkBench, say: Say) -> list[Result]:
    speeds: dict[tuple[PaperLink, int], list[float]] = {}
    with emulated_homes(bench.workers, bench.emulator) as network:
        say(f"starting {bench.workers} workers ({network.emulator})")
        with wan_cluster(network, bench.serving) as cluster:
            stages = len(cluster.stage_machines())
            for number in range(bench.rounds):
                turn = number % len(bench.links)
                for link in [*bench.links[turn:], *bench.links[:turn]]:
                    machines = len(network.machines)
                    topology = ring_topology(machines, link.rtt_ms / 2 * machines, link.mbit)
                    network.impose(initial_conditions(topology, network.machines))
                    cluster.ask(_body(bench, 0, tokens=4))
                    for batch in bench.batches:
                        say(f"{link.told}: batch {batch}, round {number + 1} of {bench.rounds}")
                        speeds.setdefault((link, batch), []).append(_speed(bench, cluster, number, batch))
    results = [Result("stages", stages, "stages", {"emulator": str(network.emulator)})]
    for (link, batch), found in speeds.items():
        labels = {"link": link.told, "batch": batch}
        results.append(Result("throughput", statistics.median(found), "tok/s", labels))
        results.append(Result("steps", statistics.median(found) / batch, "steps/s", labels))
    return results


def _speed(bench: LinkBench, cluster: WanCluster, number: int, batch: int) -> float:
    answers, _ = cluster.ask_all([_body(bench, number * 1000 + index) for index in range(batch)])
    return tokens_per_s(answers)


def tokens_per_s(answers: Sequence[TimedAnswer]) -> float:
    """Of all together: tokens after the first of each, from when the first of them began to when the last ended."""
    tokens = sum(max(0, answer.tokens - 1) for answer in answers)
    span_s = max(answer.last_s for answer in answers) - min(answer.first_s for answer in answers)
    return tokens / span_s if span_s > 0 else 0.0


def _body(bench: LinkBench, seed: int, *, tokens: int = 0) -> dict[str, object]:
    prompt = np.random.default_rng(seed).integers(*_VOCABULARY, bench.prompt_tokens)
    return {
        "prompt": [int(token) for token in prompt],
        "max_tokens": tokens or bench.tokens,
        "ignore_eos": True,
        "speculation": {"drafter": "off"},
        "cache_salt": f"paper-{seed}",
    }
