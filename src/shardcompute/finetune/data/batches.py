"""Batches: which examples a step learns from, in an order that seed and step decide alone.

Examples are read epoch after epoch, each in an order of its own, as one stream; a step takes the next `batch` of it. So
the position in the data is the number of the step and nothing else. A step's loss is the mean over all tokens that are
learned in it, however they lie in its micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardcompute.finetune.data.examples import Example, TrainingUnit


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Examples that go through the stages together, one behind the other as rows.

    `targets` are the tokens to be learned, of the rows `rows`; `total` is how many the whole step has. Of preferences,
    chosen and rejected answers lie in turn, and `total` counts pairs.
    """

    ids: NDArray[np.int32]
    lengths: tuple[int, ...]
    rows: NDArray[np.int32]
    targets: NDArray[np.int32]
    total: int
    key: tuple[int, int] = (0, 0)
    """Step and number, by which chance is drawn."""
    teacher: NDArray[np.float32] | None = None
    """A teacher's log-probabilities of the targets' places, `[targets, vocabulary]`."""

    def units(self, *, is_paired: bool) -> int:
        """Its own part of `total`."""
        return len(self.lengths) // 2 if is_paired else len(self.targets)


def steps_of(examples: int, batch: int, epochs: float) -> int:
    """How many steps so many epochs take."""
    return max(1, int(np.ceil(examples * epochs / batch)))


def choose_examples(count: int, step: int, batch: int, seed: int) -> list[int]:
    """The numbers of the examples of a step."""
    chosen = []
    epoch, order = -1, np.empty(0, dtype=np.int64)
    for place in range(step * batch, (step + 1) * batch):
        if place // count != epoch:
            epoch = place // count
            order = np.random.default_rng([seed, epoch]).permutation(count)
        chosen.append(int(order[place % count]))
    return chosen


def step_batches(
    examples: Sequence[TrainingUnit], step: int, *, batch: int, micro_batches: int, seed: int
) -> list[MicroBatch]:
    """What a step learns from, in parts of about equally many tokens each."""
    chosen = [examples[number] for number in choose_examples(len(examples), step, batch, seed)]
    return pack_batches(chosen, micro_batches, step)


def pack_batches(chosen: Sequence[TrainingUnit], count: int, step: int = 0) -> list[MicroBatch]:
    """Examples in `count` parts, the longest first to the shortest part."""
    total = sum(example.units for example in chosen)
    parts: list[list[TrainingUnit]] = [[] for _ in range(min(count, len(chosen)))]
    sizes = [0] * len(parts)
    for example in sorted(chosen, key=lambda each: -each.tokens):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(example)
        sizes[smallest] += example.tokens
    flat = [[each for example in part for each in example.sequences] for part in parts]
    return [_pack(part, total, (step, number)) for number, part in enumerate(flat)]


def _pack(part: Sequence[Example], total: int, key: tuple[int, int]) -> MicroBatch:
    rows, targets, first = [], [], 0
    for example in part:
        learned = np.flatnonzero(example.is_learned[1:])
        rows.append(learned + first)
        targets.append(example.ids[learned + 1])
        first += len(example.ids)
    return MicroBatch(
        ids=np.concatenate([example.ids for example in part]),
        lengths=tuple(len(example.ids) for example in part),
        rows=np.concatenate(rows).astype(np.int32),
        targets=np.concatenate(targets).astype(np.int32),
        total=total,
        key=key,
    )
