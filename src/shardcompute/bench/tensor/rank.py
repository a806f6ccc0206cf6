"""One rank of `bench tensor`, a process of its own with one computing thread.

Reads its task as a line of JSON, meets the other ranks, and loads its share. The first rank then decodes whenever it is
told to, and says how long steps took; the others follow it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions, PickRule
from shardcompute.bench.collectives.rank import RankTask, connect_rank, hear_line, say_line
from shardcompute.collectives import FabricGroup
from shardcompute.core.batch import Segment
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import whole
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.models.tensor_share import Exchange
from shardcompute.runtime.shard import open_shard, split_checkpoint
from shardcompute.runtime.tensor_stage import TensorLeader, follow_leader
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

_GREEDY = PickRule()
Pick = Callable[[Sequence[Segment], Any], int]


@dataclass(frozen=True, slots=True)
class TensorTask(RankTask):
    """What is computed besides: `steps` greedy tokens behind a made-up prompt."""

    model: str = ""
    form: str = "native"
    exchange: Exchange = "reduce"
    prompt: int = 32
    steps: int = 32


def main() -> None:
    task = TensorTask(**json.loads(sys.stdin.readline()))
    options = ExecutorOptions(
        kv_bytes=1 << 30, context_length=max(256, task.prompt + task.steps), max_rows=max(64, task.prompt)
    )
    with open_checkpoint(resolve(parse_reference(task.model), load_settings())) as checkpoint:
        stage = whole(checkpoint.spec)
        if task.ranks == 1:
            executor: Executor = open_shard(checkpoint, form=task.form, options=options)
            _serve(task, executor, lambda segments, ids: int(executor.step(segments, ids)[0].argmax()))
            return
        group = connect_rank(task)
        split = split_checkpoint(checkpoint, [1.0] * task.ranks, form=task.form, exchange=task.exchange)
        rank = TensorRank(checkpoint.spec, split, group)
        executor = open_shard(checkpoint, form=task.form, options=options, rank=rank)
    # Loading takes some ranks longer than others, and longer than collectives wait.
    _wait_for_all(group)
    if task.rank:
        follow_leader(executor, rank, group, stage)
        return
    leader = TensorLeader(executor, rank, group, stage, options)

    def pick(segments: Sequence[Segment], ids: Any) -> int:
        return leader.launch_picks(segments, ids, [_GREEDY]).token(0) or 0

    _serve(task, leader, pick, group)
    leader.close()


def _wait_for_all(group: FabricGroup) -> None:
    here = np.zeros(1, np.uint8)
    for other in range(1, group.size):
        if group.rank == 0:
            group.receive(other, timeout_s=600)
        elif group.rank == other:
            group.send(here, 0)
    group.broadcast(here if group.rank == 0 else None, 0, 600)


def _serve(task: TensorTask, executor: Executor, pick: Pick, group: FabricGroup | None = None) -> None:
    say_line({"ready": True})
    while hear_line()["go"]:
        say_line(_turn(task, executor, pick, group))


def _turn(task: TensorTask, executor: Executor, pick: Pick, group: FabricGroup | None) -> dict[str, Any]:
    started_s = time.perf_counter()
    tokens = [pick([Segment(1, 0, task.prompt, 1)], np.arange(task.prompt) + 5)]
    prefill_s = time.perf_counter() - started_s
    before = None if group is None else group.stats
    seconds = []
    for position in range(task.prompt, task.prompt + task.steps):
        started_s = time.perf_counter()
        tokens.append(pick([Segment(1, position, 1, 1)], np.array(tokens[-1:])))
        seconds.append(time.perf_counter() - started_s)
    turn = {
        "prefill_s": prefill_s,
        "step_s": statistics.median(seconds),
        "least_step_s": min(seconds),
        "tokens": tokens,
    }
    if group is not None and before is not None:
        after = group.stats
        turn["exchange_s"] = (after.busy_s - before.busy_s) / task.steps
        turn["exchanges"] = (sum(after.calls.values()) - sum(before.calls.values())) / task.steps
        turn["sent_bytes"] = (after.bytes_sent - before.bytes_sent) / task.steps
    executor.close_session(1)
    return turn


if __name__ == "__main__":
    main()
