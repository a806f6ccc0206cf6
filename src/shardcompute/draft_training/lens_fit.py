"""Fits lenses where a whole model is at hand: it answers questions, and the states on the way are compared.

What is learned from is the model's own text, since that is what will be drafted, and whatever text is given besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice, pairwise

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling
from shardcompute.decoding import Sampler, TokenHistory, build_sampler
from shardcompute.draft_training.questions import ASKS, TOPICS
from shardcompute.models.spec import Stage
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.runtime.lens import Lens, LensSums
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.sources.progress import NullProgress, Progress

_SESSIONS = 16
_ANSWER_TOKENS = 128
_PROMPT_TOKENS = 64
_PASSAGE_TOKENS = 192
_TEMPERATURES = (0.7, 1.0)
_READER = -1
"""The session of passages; those of answers count from 0."""


def fit_lenses(
    checkpoint: Checkpoint,
    layers: Sequence[int],
    options: ExecutorOptions,
    *,
    tokens: int,
    backend: str = "onnx",
    form: str = "native",
    text: str = "",
    progress: Progress | None = None,
) -> dict[int, Lens]:
    """A lens for the states behind each of the first `layers` layers, from about so many tokens of answers and as
    many of the `text`."""
    total = checkpoint.spec.layer_count
    cuts = sorted(set(layers))
    if not cuts or cuts[0] < 1 or cuts[-1] >= total:
        raise UsageError(
            f"a draft head belongs behind one of the layers 1 to {total - 1}",
            hint="choose others with --layer",
        )
    options = replace(options, max_rows=_PROMPT_TOKENS, max_wanted=_PROMPT_TOKENS)
    stages = [Stage(start, stop, total) for start, stop in pairwise([0, *cuts, total])]
    progress = progress or NullProgress()
    progress.start(f"Fitting draft heads of {checkpoint.name}", None)
    try:
        executors = [
            open_shard(checkpoint, stage=stage, backend=backend, form=form, options=options)
            for stage in stages
        ]
        return _LensFit(executors, cuts, checkpoint.spec.hidden, checkpoint.tokenizer()).run(tokens, text)
    finally:
        progress.finish()


class _LensFit:
    """A model in stages that talks to itself, and the sums behind each stage but the last."""

    def __init__(
        self, executors: Sequence[Executor], cuts: Sequence[int], hidden: int, tokenizer: Tokenizer
    ) -> None:
        self._executors = executors
        self._tokenizer = tokenizer
        self._sums = {cut: LensSums(hidden) for cut in cuts}
        self._seen: list[list[Float32]] = [[] for _ in executors]

    def run(self, tokens: int, text: str) -> dict[int, Lens]:
        ids = self._tokenizer.encode(text)[:tokens] if text else []
        for start in range(0, len(ids), _PASSAGE_TOKENS):
            self._read(ids[start : start + _PASSAGE_TOKENS])
        tokens, done = tokens + len(ids), len(ids)
        prompts = ((i, TOPICS[i % len(TOPICS)], ASKS[i % len(ASKS)]) for i in count())
        while done < tokens:
            group = islice(prompts, _SESSIONS)
            self._answer([(number, ask.format(topic)) for number, topic, ask in group])
            done = self._add_up()
        for executor in self._executors:
            executor.close()
        return {cut: sums.solve() for cut, sums in self._sums.items()}

    def _read(self, ids: Sequence[int]) -> None:
        """Compute a passage of text; remembers the states of every row."""
        for start in range(0, len(ids), _PROMPT_TOKENS):
            part = ids[start : start + _PROMPT_TOKENS]
            self._step([Segment(_READER, start, len(part), len(part))], np.array(part))
        for executor in self._executors:
            executor.close_session(_READER)
        self._add_up()

    def _answer(self, questions: Sequence[tuple[int, str]]) -> None:
        """Have all of these answered side by side; remembers the states of every row."""
        samplers: dict[int, Sampler] = {}
        last: dict[int, tuple[int, int]] = {}
        for number, question in questions:
            ids = self._encode(question)
            samplers[number] = build_sampler(Sampling(temperature=_TEMPERATURES[number % 2], seed=number))
            logits = self._step([Segment(number, 0, len(ids), len(ids))], np.array(ids))
            last[number] = (len(ids), samplers[number](logits[-1], TokenHistory(()), len(ids)).id)
        for _ in range(_ANSWER_TOKENS):
            last = {number: end for number, end in last.items() if end[1] not in self._tokenizer.eos_ids}
            if not last:
                break
            segments = [Segment(number, start, 1, 1) for number, (start, _) in last.items()]
            logits = self._step(segments, np.array([token for _, token in last.values()]))
            for (number, (start, _)), row in zip(list(last.items()), logits, strict=True):
                last[number] = (start + 1, samplers[number](row, TokenHistory(()), start + 1).id)
        for number, _ in questions:
            for executor in self._executors:
                executor.close_session(number)

    def _encode(self, question: str) -> list[int]:
        if self._tokenizer.has_chat_template:
            ids = self._tokenizer.encode_chat([{"role": "user", "content": question}])
        else:
            ids = self._tokenizer.encode(question)
        return ids[-_PROMPT_TOKENS:]

    def _step(self, segments: Sequence[Segment], ids: Array) -> Array:
        rows = ids
        *others, last = self._executors
        for seen, executor in zip(self._seen, others, strict=False):
            rows = np.array(executor.step(segments, rows), dtype=np.float32)
            seen.append(rows)
        logits = last.step(segments, rows, keeps_hidden=True)
        self._seen[-1].append(np.array(last.hidden_rows(), dtype=np.float32))
        return logits

    def _add_up(self) -> int:
        """Move what was seen into the sums; how many rows these hold by now."""
        *states, final = [np.concatenate(seen) for seen in self._seen]
        for sums, rows in zip(self._sums.values(), states, strict=True):
            sums.add(rows, final)
        self._seen = [[] for _ in self._seen]
        return next(iter(self._sums.values())).rows
