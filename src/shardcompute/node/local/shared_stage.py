"""Shared stage of a model in this process: layers in whose linear maps two other machines are asked, on shares."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.core.errors import UsageError
from shardcompute.models.spec import Stage
from shardcompute.runtime.shared_maps import ShareMultiplier, open_shared_stage
from shardcompute.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class SharedStage:
    """Layers `[start, stop)`, and who multiplies with their maps."""

    start: int
    stop: int
    multiplier: ShareMultiplier

    def cut(self, layers: int) -> list[Stage]:
        """The model in stages of which this is one."""
        if not 0 <= self.start < self.stop <= layers:
            raise UsageError(
                f"the model has no layers {self.start} to {self.stop - 1}", hint=f"it has 0 to {layers - 1}"
            )
        ends = sorted({0, self.start, self.stop, layers})
        return [Stage(start, stop, layers) for start, stop in itertools.pairwise(ends)]

    def open(
        self, checkpoint: Checkpoint, stage: Stage, form: str, options: ExecutorOptions
    ) -> Executor | None:
        """None for the stages besides."""
        if stage.start != self.start:
            return None
        if checkpoint.adapters:
            raise UsageError(
                "adapters are not computed on shares", hint="merge one of them with --merge-adapter"
            )
        source = checkpoint.source(stage, form=form)
        return open_shared_stage(checkpoint.spec, stage, source, self.multiplier, options)
