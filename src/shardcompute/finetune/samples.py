"""Samples: what the model answers with and without an adapter, greedily, for people to compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.finetune.data.examples import Example
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint

SAMPLE_TOKENS = 48
_CONTEXT = 1024


def prompts_of(examples: Sequence[Example], count: int) -> list[list[int]]:
    """What comes before the first learned token of some examples; at least their first token."""
    return [
        [int(each) for each in example.ids[: max(1, int(np.argmax(example.is_learned)))]]
        for example in examples[:count]
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
