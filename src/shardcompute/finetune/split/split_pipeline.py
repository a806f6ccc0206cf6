"""A `LearningPipeline` whose ends are here, with the data, and whose layers between are someone else's.

A step sends rows of all its micro-batches to those layers, takes what they make of them, sends gradients back and takes
theirs. Every stage has its micro-batches in their order, so that numbers are those of any other cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.pipeline import StepOutcome, clip_scale
from shardcompute.finetune.split.ownership import without_content
from shardcompute.finetune.stage import FinetuneStage

_AHEAD = 3


class LentStages(Protocol):
    """The layers between. Rows and gradients of a micro-batch are known by its number."""

    @property
    def depth(self) -> int:
        """How many stages there are."""
        ...

    @property
    def wire_bytes(self) -> int:
        """What went to, between and from them so far."""
        ...

    def begin(self, batches: Sequence[MicroBatch], *, learns: bool) -> None:
        """These batches come now, without their content; forward alone where nothing is learned from them."""
        ...

    def send_rows(self, number: int, rows: torch.Tensor) -> None: ...

    def take_rows(self, number: int) -> torch.Tensor: ...

    def send_gradient(self, number: int, gradient: torch.Tensor) -> None: ...

    def take_gradient(self, number: int) -> torch.Tensor: ...

    def finish(self) -> list[float]:
        """All batches are through: squared sums of gradients, by layer."""
        ...

    def apply_gradients(self, step: int, scale: float) -> None: ...

    def state(self) -> dict[str, Float32]: ...

    def load_state(self, state: Mapping[str, Float32]) -> None: ...


@dataclass(frozen=True, slots=True)
class SeenByOthers:
    """What the layers between were given and gave back, of each micro-batch: one row for each token."""

    rows_in: list[Float32]
    rows_out: list[Float32]
    gradients_in: list[Float32]


class SplitPipeline:
    """`first` and `last` are the stages that stay at home."""

    def __init__(self, first: FinetuneStage, lent: LentStages, last: FinetuneStage) -> None:
        self.first, self._lent, self._last = first, lent, last
        self._plan = first.plan

    @property
    def wire_bytes(self) -> int:
        return self._lent.wire_bytes

    def learn(self, step: int, batches: Sequence[MicroBatch]) -> StepOutcome:
        loss, squares = self._run(batches, SeenByOthers([], [], []))
        norm, scale = clip_scale(squares, self._plan.clip)
        self.first.apply_gradients(step, scale)
        self._last.apply_gradients(step, scale)
        self._lent.apply_gradients(step, scale)
        return StepOutcome(loss, norm)

    def observe(self, batches: Sequence[MicroBatch]) -> SeenByOthers:
        """What others see of batches; nothing is learned from them."""
        seen = SeenByOthers([], [], [])
        # Others take no more at once than in a step.
        for start in range(0, len(batches), self._plan.micro_batches):
            taken = batches[start : start + self._plan.micro_batches]
            self._run(
                [replace(batch, key=(batch.key[0], number)) for number, batch in enumerate(taken)],
                seen,
                is_seen=True,
            )
        return seen

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        weighted = learned = 0.0
        for batch in batches:
            alone = replace(without_content(batch), key=(batch.key[0], 0))
            self._lent.begin([alone], learns=False)
            self._lent.send_rows(0, self.first.evaluate(batch))
            weighted += float(self._last.evaluate(batch, self._lent.take_rows(0))) * batch.total
            learned += batch.units(is_paired=self._plan.loss.kind == "dpo")
            self._lent.finish()
        return weighted / learned

    def state(self) -> dict[str, Float32]:
        return {**self.first.state(), **self._lent.state(), **self._last.state()}

    def load_state(self, state: Mapping[str, Float32]) -> None:
        self.first.load_state(state)
        self._last.load_state(state)
        self._lent.load_state(state)

    def _run(
        self, batches: Sequence[MicroBatch], seen: SeenByOthers, *, is_seen: bool = False
    ) -> tuple[float, list[float]]:
        """All of a step but its end: its loss, and the squared sums of all layers' gradients."""
        lent, loss = self._lent, 0.0
        self.first.forget()
        self._last.forget()
        lent.begin([without_content(batch) for batch in batches], learns=True)
        sent = 0
        for place, batch in enumerate(batches):
            # So many are under way that no stage waits, and few enough that none has to keep them all.
            while sent < min(len(batches), place + lent.depth + _AHEAD):
                self._send(batches[sent], seen if is_seen else None)
                sent += 1
            loss += self._turn(batch, seen if is_seen else None)
            if place >= lent.depth:
                self._return(batches[place - lent.depth])
        for batch in batches[max(0, len(batches) - lent.depth) :]:
            self._return(batch)
        middle = lent.finish()
        ends = [[float(each) for each in stage.gather_gradients()] for stage in (self.first, self._last)]
        return loss, [*ends[0], *middle, *ends[1]]

    def _send(self, batch: MicroBatch, seen: SeenByOthers | None) -> None:
        rows = self.first.forward(batch)
        if seen is not None:
            seen.rows_in.append(_plain(rows))
        self._lent.send_rows(batch.key[1], rows)

    def _turn(self, batch: MicroBatch, seen: SeenByOthers | None) -> float:
        """Where a micro-batch turns back: its part of the loss."""
        rows = self._lent.take_rows(batch.key[1])
        loss = float(self._last.forward(batch, rows))
        gradient = self._last.backward(batch.key[1])
        assert gradient is not None, "what came from others is a leaf of the graph"
        if seen is not None:
            seen.rows_out.append(_plain(rows))
            seen.gradients_in.append(_plain(gradient))
        self._lent.send_gradient(batch.key[1], gradient)
        return loss

    def _return(self, batch: MicroBatch) -> None:
        self.first.backward(batch.key[1], self._lent.take_gradient(batch.key[1]))


class StagesHere:
    """Lent stages in this very process: what others would compute, for tests and to measure what they see."""

    wire_bytes = 0

    def __init__(self, stages: Sequence[FinetuneStage]) -> None:
        self._stages = list(stages)
        self._batches: dict[int, MicroBatch] = {}
        self._learns = False
        self._rows: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    @property
    def depth(self) -> int:
        return len(self._stages)

    def begin(self, batches: Sequence[MicroBatch], *, learns: bool) -> None:
        self._batches = {batch.key[1]: batch for batch in batches}
        self._learns = learns
        for stage in self._stages:
            stage.forget()

    def send_rows(self, number: int, rows: torch.Tensor) -> None:
        batch = self._batches[number]
        for stage in self._stages:
            rows = stage.forward(batch, rows) if self._learns else stage.evaluate(batch, rows)
        self._rows[number] = rows

    def take_rows(self, number: int) -> torch.Tensor:
        return self._rows.pop(number)

    def send_gradient(self, number: int, gradient: torch.Tensor) -> None:
        for stage in reversed(self._stages):
            passed = stage.backward(number, gradient)
            assert passed is not None, "only the first stage of a model gives none"
            gradient = passed
        self._gradients[number] = gradient

    def take_gradient(self, number: int) -> torch.Tensor:
        return self._gradients.pop(number)

    def finish(self) -> list[float]:
        if not self._learns:
            return []
        return [float(each) for stage in self._stages for each in stage.gather_gradients()]

    def apply_gradients(self, step: int, scale: float) -> None:
        for stage in self._stages:
            stage.apply_gradients(step, scale)

    def state(self) -> dict[str, Float32]:
        return {name: values for stage in self._stages for name, values in stage.state().items()}

    def load_state(self, state: Mapping[str, Float32]) -> None:
        for stage in self._stages:
            stage.load_state(state)


def _plain(values: torch.Tensor) -> Float32:
    return np.array(values.detach().float().cpu().numpy())
