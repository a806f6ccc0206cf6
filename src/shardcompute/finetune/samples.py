"""Samples: what the model answers with and without an adapter, greedily, for people to compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.data.examples import TrainingUnit
from shardcompute.finetune.stage import FinetuneStage
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint

SAMPLE_TOKENS = 48
_CONTEXT = 1024


def prompts_of(units: Sequence[TrainingUnit], count: int) -> list[list[int]]:
    """What comes before the first learned token of some examples; at least their first token."""
    return [
        [int(each) for each in example.ids[: max(1, int(np.argmax(example.is_learned)))]]
        for example in (unit.sequences[0] for unit in units[:count])
    ]


def sample_both(
    checkpoint: Checkpoint, folder: Path, prompts: Sequence[Sequence[int]], threads: int
) -> list[tuple[list[int], list[int]]]:
    """Answers of the base and of the adapter in `folder`, for each prompt."""
    spec, longest = checkpoint.spec, max(map(len, prompts))
    context = min(spec.context_length, max(_CONTEXT, longest + SAMPLE_TOKENS))
    options = ExecutorOptions(
        kv_bytes=2 * context * spec.kv_bytes_per_token_and_layer() * spec.layer_count,
        context_length=context,
        max_rows=max(longest, 64),
        max_logit_rows=16,
        threads=threads,
    )
    executor = open_shard(checkpoint.with_adapters({"taught": folder}), backend="onnx", options=options)
    ends = checkpoint.tokenizer().eos_ids
    return [
        (_answer(executor, prompt, 0, ends, context), _answer(executor, prompt, 1, ends, context))
        for prompt in prompts
    ]


def sample_stage(
    stage: FinetuneStage, prompts: Sequence[Sequence[int]], ends: frozenset[int]
) -> list[tuple[list[int], list[int]]]:
    """The same of a stage that is the whole model, for adapters that are not served: every token computes all before it
    again."""
    return [
        (
            _answer_again(stage, prompt, ends, is_taught=False),
            _answer_again(stage, prompt, ends, is_taught=True),
        )
        for prompt in prompts
    ]


def _answer_again(
    stage: FinetuneStage, prompt: Sequence[int], ends: frozenset[int], *, is_taught: bool
) -> list[int]:
    ids = list(prompt)[-stage.plan.longest + 1 :]
    begun = len(ids)
    for _ in range(min(SAMPLE_TOKENS, stage.plan.longest - begun)):
        batch = MicroBatch(
            np.asarray(ids, dtype=np.int32),
            (len(ids),),
            np.asarray([len(ids) - 1], dtype=np.int32),
            np.zeros(1, dtype=np.int32),
            1,
        )
        picked = int(stage.predict(batch, is_taught=is_taught)[0].argmax())
        if picked in ends:
            break
        ids.append(picked)
    return ids[begun:]


def _answer(
    executor: Executor, prompt: Sequence[int], adapter: int, ends: frozenset[int], context: int
) -> list[int]:
    ids = list(prompt)
    rows = np.asarray(ids, dtype=np.int64)
    for _ in range(min(SAMPLE_TOKENS, context - len(prompt))):
        start = len(ids) - len(rows)
        logits = executor.step([Segment(1, start, len(rows), 1, adapter)], rows)
        picked = int(np.argmax(logits[-1]))
        if picked in ends:
            break
        ids.append(picked)
        rows = np.asarray([picked], dtype=np.int64)
    executor.close_session(1)
    return ids[len(prompt) :]
