"""Hidden states of real texts at the boundaries between layers; text to train attacks on and to try them on apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array, Float32
from shardcompute.bench.questions import QUESTIONS, rules
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.models.spec import Stage
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint

PIECE = 128
"""Tokens that are computed as one text."""


def read_pieces(data: Path | None, tokenizer: Tokenizer, count: int) -> list[Array]:
    """Equal pieces of text, from the beginning of the file."""
    ids: list[int] = []
    for text in _texts(data):
        ids += tokenizer.encode(text)
        if len(ids) >= count * PIECE:
            break
    if len(ids) < 2 * PIECE:
        raise UsageError(
            f"{len(ids)} tokens of text are too few to train an attack and to try it",
            hint=f"give a --data file with at least {2 * PIECE} tokens",
        )
    pieces = [ids[at : at + PIECE] for at in range(0, len(ids) - PIECE + 1, PIECE)]
    return [np.array(piece, dtype=np.int64) for piece in pieces[:count]]


def _texts(data: Path | None) -> Iterator[str]:
    if data is None:
        yield from QUESTIONS
        for number in range(100_000):
            yield rules(number)
        return
    try:
        lines = data.read_text(encoding="utf-8").splitlines()
        yield from (json.loads(line)["text"] for line in lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {data}: {error}", hint="give JSON lines with a `text` each") from error


class AttackedModel:
    """The model as the attacker has it, too: any layers of it, in the form in which they are served."""

    def __init__(self, checkpoint: Checkpoint, form: str, backend: str = "onnx") -> None:
        self.checkpoint = checkpoint
        self.form = form
        self.layers = checkpoint.spec.layer_count
        self._backend = backend
        self._options = ExecutorOptions(
            kv_bytes=256 << 20, context_length=PIECE + 1, max_logit_rows=PIECE, threads=1
        )

    def open(self, start: int, stop: int, form: str = "") -> Executor:
        stage = Stage(start, stop, self.layers)
        return open_shard(
            self.checkpoint,
            stage=stage,
            backend=self._backend,
            form=form or self.form,
            options=self._options,
        )

    def embedding(self) -> Float32:
        source = self.checkpoint.source(Stage(0, 1, self.layers))
        return np.asarray(source.matrix("embedding").to_dense(), np.float32)

    def advance(self, start: int, stop: int, rows: Sequence[Array]) -> list[Float32]:
        """Rows behind layer `stop - 1`, of each text; behind the last one before the norm."""
        is_last = stop == self.layers
        made = []
        with closing(self.open(start, stop)) as executor:
            for each in rows:
                segments = [Segment(0, 0, len(each), 1 if is_last else 0)]
                out = executor.step(segments, each, keeps_hidden=is_last)
                made.append(np.array(executor.final_rows() if is_last else out, np.float32))
                executor.close_session(0)
        return made

    def logits(self, start: int, rows: Sequence[Array], form: str = "") -> Iterator[Float32]:
        with closing(self.open(start, self.layers, form)) as executor:
            for each in rows:
                out = executor.step([Segment(0, 0, len(each), len(each))], each)
                yield np.array(out, np.float32)
                executor.close_session(0)


def mean_loss(logits: Float32, ids: Array) -> float:
    """In nats, of the tokens that follow."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    own = rows[np.arange(len(rows)), ids[1:]]
    return float((np.log(np.exp(rows).sum(axis=1)) - own).mean())
