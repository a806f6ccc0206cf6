"""What others could still read: tokens and labels, from the states and gradients that they see.

They have the base's weights, and text of their own that they can send through them: so a linear probe is fitted on some
examples, from rows to the embeddings of what is to be guessed, and its nearest tokens are compared with the others'
true ones, among those that occur and many more. It says what is read with little effort, not what cannot be read with
much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.split.split_pipeline import SeenByOthers, SplitPipeline

_TEST_ROWS = 2048
_MORE_CANDIDATES = 20_000
_RIDGE = 1e-2
Guess = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Shares that were guessed rightly. `common` is what guessing the most frequent label would reach."""

    tokens: float
    """Of the tokens themselves, from states that leave their owner."""
    labels: float
    """Of the learned tokens, from gradients that leave their owner."""
    predicted: float
    """Of the learned tokens, from states that the others hand back: what the model expects of itself."""
    common: float
    fitted: int
    tested: int

    def __str__(self) -> str:
        return (
            f"of {self.tested} tokens a linear probe reads {self.tokens:.0%} from states; of what is learned it reads "
            f"{self.labels:.0%} from gradients and {self.predicted:.0%} from states "
            f"(always the most frequent one: {self.common:.0%})"
        )


def measure_leak(pipeline: SplitPipeline, batches: Sequence[MicroBatch]) -> LeakReport:
    """Fitted on the first half of the batches, tested on the others."""
    seen = pipeline.observe(batches)
    return probe_leak(seen, batches, pipeline.first.embed, pipeline.first.vocab_size)


def probe_leak(
    seen: SeenByOthers,
    batches: Sequence[MicroBatch],
    embed: Callable[[NDArray[np.int32]], Float32],
    vocab_size: int,
) -> LeakReport:
    """Of at least two batches. `embed` gives the embeddings of tokens."""
    half = len(batches) // 2
    candidates = choose_candidates(batches, vocab_size)
    tokens = [np.searchsorted(candidates, batch.ids) for batch in batches]
    labels = [np.searchsorted(candidates, batch.targets) for batch in batches]
    codes = unit_rows(embed(candidates))
    width = codes.shape[1]

    def guessed(rows: Sequence[Float32], truth: Sequence[Guess]) -> float:
        # Of preferences, rows of the frozen model lie beside those of the one that learns.
        states = [unit_rows(each[:, :width]) for each in rows]
        fitted = np.concatenate(states[:half]), np.concatenate(truth[:half])
        tested = np.concatenate(states[half:])[:_TEST_ROWS], np.concatenate(truth[half:])[:_TEST_ROWS]
        probe = fit_probe(fitted[0], codes[fitted[1]])
        # A row may lie near an embedding by itself, and a gradient opposite to it.
        guesses = (_nearest(each, codes) for each in (tested[0], -tested[0], tested[0] @ probe))
        return max(float((guess == tested[1]).mean()) for guess in guesses)

    at_labels = [
        [each[batch.rows] for each, batch in zip(rows, batches, strict=True)]
        for rows in (seen.gradients_in, seen.rows_out)
    ]
    tested = np.concatenate(labels[half:])[:_TEST_ROWS]
    return LeakReport(
        tokens=guessed(seen.rows_in, tokens),
        labels=guessed(at_labels[0], labels),
        predicted=guessed(at_labels[1], labels),
        common=float((tested == np.bincount(np.concatenate(labels[:half])).argmax()).mean()),
        fitted=sum(map(len, tokens[:half])),
        tested=len(np.concatenate(tokens[half:])[:_TEST_ROWS]),
    )


def choose_candidates(batches: Sequence[MicroBatch], vocab_size: int) -> NDArray[np.int32]:
    """What is guessed among: all tokens that occur, and others by chance."""
    others = np.random.default_rng(1).permutation(vocab_size)[:_MORE_CANDIDATES]
    occurring = [each for batch in batches for each in (batch.ids, batch.targets)]
    return np.unique(np.concatenate([*occurring, others])).astype(np.int32)


def unit_rows(rows: Float32) -> Float32:
    found: Float32 = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return found


def fit_probe(rows: Float32, codes: Float32) -> Float32:
    """The ridge regression from rows to codes."""
    wide = rows.astype(np.float64)
    square = wide.T @ wide
    square += np.eye(len(square)) * _RIDGE * np.trace(square) / len(square)
    found: Float32 = np.linalg.solve(square, wide.T @ codes).astype(np.float32)
    return found


def _nearest(rows: Float32, codes: Float32) -> Guess:
    return np.concatenate(
        [(part @ codes.T).argmax(axis=1) for part in np.array_split(rows, 1 + len(rows) // 256)]
    )
