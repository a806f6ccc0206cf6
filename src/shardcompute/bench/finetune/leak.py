"""What machines could read that compute the middle layers in split learning, by how many layers stay at home.

The model reads English text that comes with Python, with the adapters that a run begins with. Shares are of tokens that
are guessed rightly (`finetune.split.leak`, `finetune.split.search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardcompute.backends.matrix import Float32
from shardcompute.bench.report import Result, Say
from shardcompute.core.settings import load_settings
from shardcompute.finetune.data.batches import MicroBatch, pack_batches
from shardcompute.finetune.data.examples import Example
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from shardcompute.models.spec import Stage
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

if TYPE_CHECKING:
    import torch

    from shardcompute.finetune.stage import FinetuneStage

_BATCHES, _BATCH = 16, 4


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
    with open_checkpoint(resolve(parse_reference(bench.model_path), load_settings())) as checkpoint:
        layers = checkpoint.spec.layer_count
        kept = sorted(each for each in bench.kept if 2 * each < layers)
        batches = pack_batches(_examples(checkpoint, bench.tokens), _BATCHES)
        say("computing what is seen at every border")
        stages = _open_stages(
            checkpoint, bench, [0, *kept, *(layers - each for each in reversed(kept)), layers]
        )
        seen = _observe(stages, batches)
        results = []
        for each in kept:
            say(f"reading what {each} layers at each end leave open")
            results += _measure(stages, seen, batches, each)
    return results


def _open_stages(checkpoint: Checkpoint, bench: LeakBench, edges: Sequence[int]) -> list[FinetuneStage]:
    from shardcompute.finetune.stage import FinetuneStage, StageOptions

    plan = FinetunePlan(
        steps=1,
        batch=_BATCHES * _BATCH,
        micro_batches=_BATCHES,
        longest=bench.tokens,
        lora=LoraShape(8, 16.0),
    )
    how = StageOptions(is_gguf=checkpoint.files.kind == "gguf")
    spec, layout = checkpoint.spec, checkpoint.layout
    cuts = [Stage(start, stop, spec.layer_count) for start, stop in pairwise(edges)]
    return [FinetuneStage(spec, layout, each, checkpoint.source(each), plan, how) for each in cuts]


@dataclass(frozen=True, slots=True)
class _Borders:
    """States and gradients at the first layers of stages, by the number of the layer and batch by batch."""

    states: dict[int, list[Float32]]
    gradients: dict[int, list[Float32]]


def _observe(stages: Sequence[FinetuneStage], batches: Sequence[MicroBatch]) -> _Borders:
    """Where a model is cut changes no number: one pass shows what every choice of kept layers would."""
    seen = _Borders({}, {})
    middle = len(stages) // 2
    for batch in batches:
        rows: torch.Tensor | None = None
        for stage in stages:
            if rows is not None:
                seen.states.setdefault(stage.stage.start, []).append(rows.float().numpy())
            rows = stage.forward(batch, rows)
        gradient: torch.Tensor | None = None
        for stage in reversed(stages[middle + 1 :]):
            gradient = stage.backward(batch.key[1], gradient)
            assert gradient is not None, "only the first stage of a model gives none"
            seen.gradients.setdefault(stage.stage.start, []).append(gradient.float().numpy())
        for stage in stages:
            stage.forget()
    return seen


def _measure(
    stages: Sequence[FinetuneStage], borders: _Borders, batches: Sequence[MicroBatch], kept: int
) -> list[Result]:
    from shardcompute.finetune.split.leak import probe_leak
    from shardcompute.finetune.split.search import search_tokens
    from shardcompute.finetune.split.split_pipeline import SeenByOthers

    first, last = stages[0], stages[0].stage.total - kept
    seen = SeenByOthers(borders.states[kept], borders.states[last], borders.gradients[last])
    report = probe_leak(seen, batches, first.embed, first.vocab_size)
    own = [stage for stage in stages if stage.stage.stop <= kept]
    shares = {
        "tokens read from states by a probe": report.tokens,
        "tokens read from states by searching": search_tokens(own, seen.rows_in, batches),
        "labels read from gradients by a probe": report.labels,
        "labels read from states by a probe": report.predicted,
        "labels that are the most frequent one": report.common,
    }
    labels = {"kept": kept, "layers": first.stage.total, "fitted": report.fitted, "tested": report.tested}
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
