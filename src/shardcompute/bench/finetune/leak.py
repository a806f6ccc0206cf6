"""What machines could read that compute the middle layers in split learning, by how many layers stay at home.

The model reads English text that comes with Python, with the adapters that a run begins with. Shares are of tokens that
are guessed rightly (`finetune.split.leak`, `finetune.split.search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.bench.report import Result, Say
from shardcompute.core.settings import load_settings
from shardcompute.finetune.data.batches import MicroBatch, pack_batches
from shardcompute.finetune.data.examples import Example
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

_BATCHES, _BATCH = 24, 4


@dataclass(frozen=True, slots=True)
class LeakBench:
    """`kept` are the numbers of layers at each end that stay at home."""

    model_path: str
    kept: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int = 64
    threads: int = 1


def run_leak_bench(bench: LeakBench, say: Say) -> list[Result]:
    import torch

    torch.set_num_threads(bench.threads)
    results = []
    with open_checkpoint(resolve(parse_reference(bench.model_path), load_settings())) as checkpoint:
        batches = pack_batches(_examples(checkpoint, bench.tokens), _BATCHES)
        layers = checkpoint.spec.layer_count
        for kept in (each for each in bench.kept if 2 * each < layers):
            say(f"{kept} layers at each end stay at home")
            results += _measure(checkpoint, batches, bench, kept)
    return results


def _measure(
    checkpoint: Checkpoint, batches: Sequence[MicroBatch], bench: LeakBench, kept: int
) -> list[Result]:
    from shardcompute.finetune.split.leak import probe_leak
    from shardcompute.finetune.split.ownership import lent_stages, own_stages
    from shardcompute.finetune.split.search import search_tokens
    from shardcompute.finetune.split.split_pipeline import SplitPipeline, StagesHere
    from shardcompute.finetune.stage import FinetuneStage, StageOptions

    plan = FinetunePlan(
        steps=1,
        batch=_BATCHES * _BATCH,
        micro_batches=_BATCHES,
        longest=bench.tokens,
        lora=LoraShape(8, 16.0),
    )
    how = StageOptions(is_gguf=checkpoint.files.kind == "gguf")
    total = checkpoint.spec.layer_count
    own = own_stages(total, kept)
    cuts = (own[0], *lent_stages(total, kept, 1), own[1])
    first, between, last = (
        FinetuneStage(checkpoint.spec, checkpoint.layout, each, checkpoint.source(each), plan, how)
        for each in cuts
    )
    seen = SplitPipeline(first, StagesHere([between]), last).observe(batches)
    report = probe_leak(seen, batches, first.embed, first.vocab_size)
    shares = {
        "tokens read from states by a probe": report.tokens,
        "tokens read from states by searching": search_tokens(first, seen.rows_in, batches),
        "labels read from gradients by a probe": report.labels,
        "labels read from states by a probe": report.predicted,
        "labels that are the most frequent one": report.common,
    }
    labels = {"kept": kept, "layers": total, "fitted": report.fitted, "tested": report.tested}
    return [
        Result(name, 100 * share, "%", {"arm": f"{kept} kept", **labels}) for name, share in shares.items()
    ]


def _examples(checkpoint: Checkpoint, tokens: int) -> list[Example]:
    """Stretches of text that lie apart, all of whose tokens are learned."""
    from pydoc_data.topics import topics

    tokenizer = checkpoint.tokenizer()
    found = []
    for name in sorted(topics):
        ids = tokenizer.encode(" ".join(topics[name].split())[: 8 * tokens])[:tokens]
        if len(ids) == tokens:
            found.append(Example(np.asarray(ids, dtype=np.int32), np.ones(tokens, dtype=np.bool_)))
    order = np.random.default_rng(1).permutation(len(found))
    return [found[place] for place in order[: _BATCHES * _BATCH]]
