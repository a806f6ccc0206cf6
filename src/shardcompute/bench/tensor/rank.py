"""One process of `bench tensor`, with one computing thread: the whole model, a tensor rank of it, or a stage.

Reads its task as a line of JSON, meets the others, loads its share and says so. The first then decodes whenever it is
told to, and says how long steps took; the others follow it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import psutil

from shardcompute.backends.executor import Executor, ExecutorOptions, PickRule
from shardcompute.bench.collectives.lan import LanFabric
from shardcompute.bench.collectives.rank import RankTask, connect_rank, hear_line, say_line
from shardcompute.bench.tensor.chain import end_chain, follow_chain, pick_through_chain
from shardcompute.collectives import FabricGroup
from shardcompute.core.batch import Segment
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import cut, whole
from shardcompute.models.tensor_share import Exchange
from shardcompute.runtime.shard import open_shard, split_checkpoint
from shardcompute.runtime.tensor_stage import TensorLeader, follow_leader, join_ranks
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

_GREEDY = PickRule()
Pick = Callable[[Sequence[Segment], Any], int]
Share = Literal["ranks", "stages"]
"""What several processes have of the model each: a part of every layer, or some layers."""


@dataclass(frozen=True, slots=True)
class TensorTask(RankTask):
    """What is computed besides: `steps` greedy tokens behind a made-up prompt."""

    model: str = ""
    form: str = "native"
    share: Share = "ranks"
    exchange: Exchange = "reduce"
    grid: Sequence[int] = ()
    """Rows and columns, where ranks are a block grid."""
    prompt: int = 32
    steps: int = 32

    @property
    def options(self) -> ExecutorOptions:
        tokens = self.prompt + self.steps
        return ExecutorOptions(
            kv_bytes=1 << 30, context_length=max(256, tokens), max_rows=max(64, self.prompt)
        )


def main() -> None:
    task = TensorTask(**json.loads(sys.stdin.readline()))
    with open_checkpoint(resolve(parse_reference(task.model), load_settings())) as checkpoint:
        if task.ranks == 1:
            executor = open_shard(checkpoint, form=task.form, options=task.options)
            _say_ready(executor)
            _serve(task, executor, lambda segments, ids: int(executor.step(segments, ids)[0].argmax()))
        elif task.share == "stages":
            _be_stage(task, checkpoint)
        else:
            _be_rank(task, checkpoint)


def _be_stage(task: TensorTask, checkpoint: Checkpoint) -> None:
    group = connect_rank(task)
    stage = cut(checkpoint.spec, task.ranks)[task.rank]
    executor = open_shard(checkpoint, stage=stage, form=task.form, options=task.options)
    _wait_for_all(group)
    _say_ready(executor)
    if task.rank:
        follow_chain(executor, group)
        return
    _serve(task, executor, lambda segments, ids: pick_through_chain(executor, group, segments, ids), (group,))
    end_chain(group)


def _be_rank(task: TensorTask, checkpoint: Checkpoint) -> None:
    group, stage = connect_rank(task), whole(checkpoint.spec)
    grid = (task.grid[0], task.grid[1]) if task.grid else None
    split = split_checkpoint(
        checkpoint, [1.0] * task.ranks, form=task.form, exchange=task.exchange, grid=grid
    )
    rank = join_ranks(checkpoint.spec, split, group)
    executor = open_shard(checkpoint, form=task.form, options=task.options, rank=rank)
    _wait_for_all(group)
    _say_ready(executor)
    if task.rank:
        follow_leader(executor, rank, group, stage)
        return
    leader = TensorLeader(executor, rank, group, stage, task.options)

    def pick(segments: Sequence[Segment], ids: Any) -> int:
        return leader.launch_picks(segments, ids, [_GREEDY]).token(0) or 0

    _serve(
        task, leader, pick, [each for each in (group, rank.row, rank.column) if isinstance(each, FabricGroup)]
    )
    leader.close()


def _wait_for_all(group: FabricGroup) -> None:
    """Loading takes some ranks longer than others, and longer than collectives wait."""
    here = np.zeros(1, np.uint8)
    for other in range(1, group.size):
        if group.rank == 0:
            group.receive(other, timeout_s=600)
        elif group.rank == other:
            group.send(here, 0)
    group.broadcast(here if group.rank == 0 else None, 0, 600)


def _say_ready(executor: Executor) -> None:
    """With what this process holds, and what of it a token of context takes."""
    usage = executor.kv_usage()
    kv_bytes = usage.total_bytes / max(1, usage.free_tokens)
    say_line({"held_bytes": psutil.Process().memory_full_info().uss, "kv_bytes": kv_bytes})


def _serve(task: TensorTask, executor: Executor, pick: Pick, groups: Sequence[FabricGroup] = ()) -> None:
    while hear_line()["go"]:
        say_line(_turn(task, executor, pick, groups))


def _turn(task: TensorTask, executor: Executor, pick: Pick, groups: Sequence[FabricGroup]) -> dict[str, Any]:
    lan = groups[0].world.fabric if groups else None
    now_s = time.thread_time if task.counts else time.perf_counter
    if isinstance(lan, LanFabric):
        now_s = lan.clock.now_s
    started_s = now_s()
    tokens = [pick([Segment(1, 0, task.prompt, 1)], np.arange(task.prompt) + 5)]
    prefill_s = now_s() - started_s
    spent_s = lan.spent_s if isinstance(lan, LanFabric) else 0.0
    before, worked_s = [group.stats for group in groups], time.process_time()
    seconds = []
    for position in range(task.prompt, task.prompt + task.steps):
        started_s = now_s()
        tokens.append(pick([Segment(1, position, 1, 1)], np.array(tokens[-1:])))
        seconds.append(now_s() - started_s)
    pairs = list(zip((group.stats for group in groups), before, strict=True))
    turn = {
        "prefill_s": prefill_s,
        "step_s": statistics.median(seconds),
        "least_step_s": min(seconds),
        "processor_s": (time.process_time() - worked_s) / task.steps,
        "tokens": tokens,
        "exchange_s": sum(new.busy_s - old.busy_s for new, old in pairs) / task.steps,
        "exchanges": sum(sum(new.calls.values()) - sum(old.calls.values()) for new, old in pairs)
        / task.steps,
        "sent_bytes": sum(new.bytes_sent - old.bytes_sent for new, old in pairs) / task.steps,
    }
    if isinstance(lan, LanFabric):
        turn["exchange_s"] = (lan.spent_s - spent_s) / task.steps
    executor.close_session(1)
    return turn


if __name__ == "__main__":
    main()
