"""Runs `bench tensor`: one process, tensor ranks and stages, all loaded at once, which take turns at decoding.

First over the machine's own lines, by the clock. Then, loaded anew over TLS, as if each had a machine of its own and
LANs of several round trips were between them: what they compute is counted in processor time, and what they wait is
reckoned (`bench.collectives.lan`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from shardcompute.bench.collectives.lan import LanNotes
from shardcompute.bench.collectives.run import (
    LAN_LINE,
    rank_papers,
    rank_url,
    read_line,
    started_rank,
    write_line,
)
from shardcompute.bench.report import Result, Say
from shardcompute.bench.tensor import rank as rank_process
from shardcompute.bench.tensor.outcome import ArmTurns, TensorArm, arm_results, crossovers
from shardcompute.bench.tensor.rank import TensorTask
from shardcompute.core.errors import UsageError
from shardcompute.models.tensor_share import Exchange, GridShape

_ALONE = TensorArm(1)


@dataclass(frozen=True, slots=True)
class TensorBench:
    """`line` is how ranks of this machine meet (see `bench collectives`), unless that is left out; each of `rtt_ms` is
    an emulated LAN besides."""

    model: str
    form: str = "native"
    ranks: Sequence[int] = (2, 3)
    exchanges: Sequence[Exchange] = ("reduce", "gather")
    stages: Sequence[int] = (2, 3)
    grids: Sequence[GridShape] = ()
    line: str = "local"
    has_loopback: bool = True
    rtt_ms: Sequence[float] = ()
    mbit: float = 1000.0
    prompt: int = 32
    steps: int = 32
    rounds: int = 5

    @property
    def arms(self) -> list[TensorArm]:
        ranks = [TensorArm(ranks, exchange) for ranks in self.ranks for exchange in self.exchanges]
        grids = [TensorArm(grid[0] * grid[1], "reduce", grid) for grid in self.grids]
        return [_ALONE, *ranks, *grids, *(TensorArm(stages, "stages") for stages in self.stages)]


def run_tensor_bench(bench: TensorBench, say: Say) -> list[Result]:
    """Also whether an arm said what one process says, for as many tokens as it did."""
    turns = _run_arms(bench, bench.line, (0.0,), say) if bench.has_loopback else []
    if bench.rtt_ms:
        turns += _run_arms(bench, LAN_LINE, bench.rtt_ms, say)
    labels = {"cores": os.cpu_count(), "steps": bench.steps}
    alone = {each.rtt_ms: each for each in turns if each.arm == _ALONE}
    results = [result for each in turns for result in arm_results(each, alone[each.rtt_ms], labels)]
    return results + crossovers(turns, labels)


def parse_exchanges(names: str) -> list[Exchange]:
    known: Sequence[Exchange] = get_args(Exchange)
    wanted = names.split(",")
    if wrong := [each for each in wanted if each not in known]:
        raise UsageError(f"ranks do not {wrong[0]!r}", hint=f"use some of {', '.join(known)}")
    return [each for each in known if each in wanted]


def parse_grids(text: str) -> list[GridShape]:
    """Block grids such as `2x2`, separated by commas."""
    grids: list[GridShape] = []
    for part in filter(None, text.split(",")):
        rows, _, columns = part.partition("x")
        if not (rows.isdecimal() and columns.isdecimal() and int(rows) * int(columns) > 1):
            raise UsageError(f"{part!r} is no block grid", hint="say its rows and columns, such as 2x2")
        grids.append((int(rows), int(columns)))
    return grids


def _run_arms(bench: TensorBench, line: str, rtts_ms: Sequence[float], say: Say) -> list[ArmTurns]:
    """All arms in turns, by round trip; what else the machine does falls on all of them."""
    with contextlib.ExitStack() as stack:
        open_arms = [
            stack.enter_context(_started(bench, arm, line, say, is_lan=rtts_ms[0] > 0)) for arm in bench.arms
        ]
        turns = {
            (each.arm, rtt_ms): ArmTurns(each.arm, rtt_ms, loaded=each.loaded)
            for rtt_ms in rtts_ms
            for each in open_arms
        }
        for turn in range(-1, bench.rounds):
            for rtt_ms in rtts_ms if turn >= 0 else rtts_ms[:1]:
                say(f"turn {turn + 1} of {bench.rounds}{f', {rtt_ms:g} ms' if rtt_ms else ''}")
                for each in open_arms:
                    each.lan.become(rtt_ms, bench.mbit)
                    told = each.decode()
                    if turn >= 0:
                        # The first turn warms up.
                        turns[each.arm, rtt_ms].turns.append(told)
        for each in open_arms:
            write_line(each.leader, {"go": False})
    return list(turns.values())


@dataclass(frozen=True, slots=True)
class _OpenArm:
    """An arm's processes, loaded: the first, and what each holds."""

    arm: TensorArm
    leader: subprocess.Popen[str]
    lan: LanNotes
    loaded: Sequence[dict[str, float]]

    def decode(self) -> dict[str, Any]:
        write_line(self.leader, {"go": True})
        return read_line(self.leader)


@contextlib.contextmanager
def _started(
    bench: TensorBench, arm: TensorArm, line: str, say: Say, *, is_lan: bool = False
) -> Iterator[_OpenArm]:
    say(f"loading {arm.name}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sc-")))
        tasks = [
            TensorTask(
                rank=rank,
                ranks=arm.ranks,
                line=line,
                url=rank_url(line),
                lan=str(folder / "lan") if is_lan else "",
                counts=is_lan,
                folder=str(folder),
                model=bench.model,
                form=bench.form,
                share="stages" if arm.kind == "stages" else "ranks",
                exchange="reduce" if arm.kind == "stages" else arm.kind,
                grid=arm.grid or (),
                prompt=bench.prompt,
                steps=bench.steps,
                certificate_pem=papers["certificate_pem"],
                authority_pem=papers["authority_pem"],
            )
            for rank, papers in enumerate(rank_papers(folder, arm.ranks))
        ]
        lan = LanNotes.open(folder / "lan", arm.ranks)
        processes = [stack.enter_context(started_rank(task, rank_process.__name__)) for task in tasks]
        if arm.ranks > 1:
            met = [read_line(each) for each in processes]
            told = {"urls": [each["url"] for each in met], "nodes": [each["node"] for each in met]}
            for process in processes:
                write_line(process, told)
        yield _OpenArm(arm, processes[0], lan, [read_line(each) for each in processes])
