"""Tensor ranks as threads of this process, to be compared with one executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Array, Float32
from shardcompute.collectives import run_ranks, thread_groups
from shardcompute.core.batch import Segment
from shardcompute.models.spec import Stage
from shardcompute.models.tensor_share import TensorSplit
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.tensor_stage import join_ranks
from shardcompute.weights.checkpoint import Checkpoint


class RankedStage:
    """The ranks of one stage, stepped together."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stage: Stage,
        split: TensorSplit,
        *,
        backend: str,
        options: ExecutorOptions,
        form: str = "native",
    ) -> None:
        self.groups = thread_groups(split.size)
        self.ranks = [join_ranks(checkpoint.spec, split, group) for group in self.groups]
        self.is_last = stage.is_last
        self.executors = [
            open_shard(
                checkpoint,
                stage=stage,
                backend=backend,
                form=form,
                options=options,
                rank=rank,
            )
            for rank in self.ranks
        ]

    def calls(self, operation: str) -> int:
        """How often ranks have met for this so far."""
        counts = {group.stats.calls.get(operation, 0) for group in self.groups}
        assert len(counts) == 1, "all ranks meet equally often"
        return counts.pop()

    def line_calls(self, operation: str) -> tuple[int, int]:
        """The same for the rows and the columns of a block grid."""
        counts = {
            tuple(line.stats.calls.get(operation, 0) for line in (rank.row, rank.column))
            for rank in self.ranks
        }
        assert len(counts) == 1, "all lines meet equally often"
        return counts.pop()

    def step(self, segments: Sequence[Segment], inputs: Array) -> Float32:
        """Logits of the whole vocabulary, or hidden states, of which every rank must have the same bits."""

        def run(rank: int) -> Float32:
            executor = self.executors[rank]
            out = np.array(executor.step(list(segments), inputs, keeps_hidden=self.is_last))
            hidden[rank] = np.array(executor.hidden_rows()) if self.is_last else out
            return out

        hidden: dict[int, Float32] = {}
        parts = run_ranks(self.groups, lambda group: run(group.rank))
        for rank in range(1, len(parts)):
            np.testing.assert_array_equal(hidden[rank], hidden[0])
        return np.concatenate(parts, axis=-1) if self.is_last else parts[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for executor, group in zip(self.executors, self.groups, strict=True):
            executor.close()
            group.close()
