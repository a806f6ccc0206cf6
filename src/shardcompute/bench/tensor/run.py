"""Runs `bench tensor`: arms of one, two and more ranks, all loaded at once, which take turns at decoding."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from shardcompute.bench.collectives.run import (
    rank_papers,
    rank_places,
    read_line,
    started_rank,
    write_line,
)
from shardcompute.bench.report import Result, Say
from shardcompute.bench.tensor import rank as rank_process
from shardcompute.bench.tensor.rank import TensorTask
from shardcompute.core.errors import UsageError
from shardcompute.models.tensor_share import Exchange


@dataclass(frozen=True, slots=True)
class TensorBench:
    """`line` is how ranks of this machine meet (see `bench collectives`); each of `rtt_ms` is an emulated LAN
    besides."""

    model: str
    form: str = "native"
    ranks: Sequence[int] = (2, 3)
    exchanges: Sequence[Exchange] = ("reduce", "gather")
    line: str = "local"
    rtt_ms: Sequence[float] = ()
    mbit: float = 1000.0
    prompt: int = 32
    steps: int = 32
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class _Arm:
    ranks: int
    exchange: Exchange = "reduce"
    rtt_ms: float = 0.0

    @property
    def name(self) -> str:
        if self.ranks == 1:
            return "1 rank"
        line = f", {self.rtt_ms:g} ms" if self.rtt_ms else ""
        return f"{self.ranks} ranks, {self.exchange}{line}"


def run_tensor_bench(bench: TensorBench, say: Say) -> list[Result]:
    """Also whether an arm said what one rank says, for as many tokens as it did."""
    arms = [_Arm(1)] + [
        _Arm(ranks, exchange, rtt_ms)
        for rtt_ms in (0.0, *bench.rtt_ms)
        for ranks in bench.ranks
        for exchange in bench.exchanges
    ]
    turns: dict[_Arm, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with contextlib.ExitStack() as stack:
        leaders = {}
        for arm in arms:
            say(f"loading {arm.name}")
            leaders[arm] = _start(stack, bench, arm)
        for turn in range(-1, bench.rounds):
            say(f"turn {turn + 1} of {bench.rounds}")
            for arm, leader in leaders.items():
                write_line(leader, {"go": True})
                told = read_line(leader)
                if turn >= 0:
                    # The first turn warms up.
                    turns[arm].append(told)
        for leader in leaders.values():
            write_line(leader, {"go": False})
    alone = turns[arms[0]]
    return [result for arm in arms for result in _results(arm, turns[arm], alone)]


def parse_exchanges(names: str) -> list[Exchange]:
    known: Sequence[Exchange] = get_args(Exchange)
    wanted = names.split(",")
    if wrong := [each for each in wanted if each not in known]:
        raise UsageError(f"ranks do not {wrong[0]!r}", hint=f"use some of {', '.join(known)}")
    return [each for each in known if each in wanted]


def _start(stack: contextlib.ExitStack, bench: TensorBench, arm: _Arm) -> subprocess.Popen[str]:
    """The first of an arm's processes, once all have loaded their shares."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sc-")))
    places = rank_places(stack, arm.ranks, "lan" if arm.rtt_ms else bench.line, arm.rtt_ms, bench.mbit)
    tasks = [
        TensorTask(
            rank=rank,
            ranks=arm.ranks,
            line="lan" if arm.rtt_ms else bench.line,
            url=url,
            shape=shape,
            folder=str(folder),
            model=bench.model,
            form=bench.form,
            exchange=arm.exchange,
            prompt=bench.prompt,
            steps=bench.steps,
            certificate_pem=papers["certificate_pem"],
            authority_pem=papers["authority_pem"],
        )
        for rank, ((url, shape), papers) in enumerate(
            zip(places, rank_papers(folder, arm.ranks), strict=True)
        )
    ]
    processes = [stack.enter_context(started_rank(task, rank_process.__name__)) for task in tasks]
    if arm.ranks > 1:
        met = [read_line(each) for each in processes]
        told = {"urls": [each["url"] for each in met], "nodes": [each["node"] for each in met]}
        for process in processes:
            write_line(process, told)
    read_line(processes[0])
    return processes[0]


def _results(
    arm: _Arm, turns: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]
) -> list[Result]:
    labels = {"arm": arm.name, "ranks": arm.ranks, "cores": os.cpu_count()}

    def middle(name: str, of: Sequence[Mapping[str, Any]] = turns) -> float:
        return float(statistics.median(turn[name] for turn in of))

    # Turns lie side by side: what else the machine does falls on both arms of a ratio.
    ratios = [one["step_s"] / each["step_s"] for one, each in zip(alone, turns, strict=True)]
    best = min(turn["least_step_s"] for turn in turns)
    found = [
        Result("decode", 1 / middle("step_s"), "tokens/s", labels),
        Result("decode_best_step", 1 / best, "tokens/s", labels),
        Result("against_one_rank", statistics.median(ratios), "×", labels),
        Result("prefill", 1e3 * middle("prefill_s"), "ms", labels),
        Result("equal_tokens", _equal(turns[0]["tokens"], alone[0]["tokens"]), "of the answer", labels),
    ]
    if arm.ranks > 1:
        found += [
            Result("exchanges", middle("exchanges"), "a token", labels),
            Result("exchange_time", 1e3 * middle("exchange_s"), "ms a token", labels),
            Result("sent", middle("sent_bytes") / 1e3, "KB a token", labels),
        ]
    return found


def _equal(tokens: Sequence[int], others: Sequence[int]) -> float:
    """The part of an answer up to where it first differs."""
    pairs = list(zip(tokens, others, strict=True))
    same = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return same / len(pairs)
