"""Tokens a second of fine-tuning, arms taking turns: ours and `peft` in this process, one worker and two as processes.

The first two teach a random Llama of the default model's widths, from one folder, with one thread and the same
micro-batches; `peft` pads them as its users do. The workers have a thread each and teach a real model as the command
line does; what is timed are whole steps as it tells them, without the first ones.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.bench.finetune.taught_run import run_finetune
from shardcompute.bench.finetune.text import write_text
from shardcompute.bench.report import Result, Say, median_ratio
from shardcompute.bench.servers import cluster_arguments, serving
from shardcompute.core.errors import BackendError
from shardcompute.core.settings import load_settings
from shardcompute.finetune.data.batches import MicroBatch, step_batches
from shardcompute.finetune.data.examples import Example, ExampleSet
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from shardcompute.finetune.preparation import PreparedRun
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

_SKIPPED = 2
_RUN_S = 1500.0
_LONGEST = 96


@dataclass(frozen=True, slots=True)
class FinetuneBench:
    """`layers` of the made-up model; `steps` of each turn, `rounds` of turns."""

    model_path: str
    layers: int = 6
    tokens: int = 96
    steps: int = 2
    rounds: int = 5
    worker_steps: int = 6
    worker_rounds: int = 2
    with_workers: bool = True


def run_finetune_bench(bench: FinetuneBench, say: Say) -> list[Result]:
    results = _against_peft(bench, say)
    return [*results, *_workers(bench, say)] if bench.with_workers else results


def _against_peft(bench: FinetuneBench, say: Say) -> list[Result]:
    plan = FinetunePlan(steps=10_000, batch=8, micro_batches=2, longest=bench.tokens, lora=LoraShape(8, 16.0))
    with tempfile.TemporaryDirectory(prefix="sc-") as folder:
        base = Path(folder) / "base"
        say("writing a made-up model")
        vocabulary = _write_base(base, bench.layers)
        examples = _examples(32, bench.tokens, vocabulary)
        ours, theirs = _open_ours(base, plan, examples), _open_peft(base, plan)
        speeds: dict[str, list[float]] = {"peft": [], "shardcompute": []}
        step = 0
        for number in range(bench.rounds + 1):
            for name, learn in (("peft", theirs), ("shardcompute", ours)):
                say(f"{name}, round {number}")
                speed = _time_steps(learn, examples, plan, step, bench.steps)
                if number:
                    speeds[name].append(speed)
            step += bench.steps
    ratio = median_ratio(speeds["shardcompute"], speeds["peft"])
    labels = {"layers": bench.layers, "threads": 1, "tokens": bench.tokens}
    return [
        *(
            Result("training speed", statistics.median(each), "tok/s", {"arm": name, **labels})
            for name, each in speeds.items()
        ),
        Result("training speed against peft", ratio, "x", {"arm": "shardcompute", **labels}),
    ]


def _time_steps(
    learn: Callable[[int, Sequence[MicroBatch]], object],
    examples: Sequence[Example],
    plan: FinetunePlan,
    first: int,
    count: int,
) -> float:
    tokens, started = 0, time.perf_counter()
    for step in range(first, first + count):
        batches = step_batches(
            examples, step, batch=plan.batch, micro_batches=plan.micro_batches, seed=plan.seed
        )
        learn(step, batches)
        tokens += sum(len(batch.ids) for batch in batches)
    return tokens / (time.perf_counter() - started)


def _write_base(folder: Path, layers: int) -> int:
    """A random Llama of SmolLM2's widths; how many tokens it knows."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return int(config.vocab_size)


def _examples(count: int, longest: int, vocabulary: int) -> tuple[Example, ...]:
    """Of half to all of the longest length, the latter half of each learned."""
    chance = np.random.default_rng(1)
    made = []
    for _ in range(count):
        length = int(chance.integers(longest // 2, longest + 1))
        ids = chance.integers(3, vocabulary, length).astype(np.int32)
        made.append(Example(ids, np.arange(length) >= length // 2))
    return tuple(made)


def _open_ours(base: Path, plan: FinetunePlan, examples: tuple[Example, ...]) -> Any:
    import torch

    from shardcompute.finetune.local import LocalOptions, open_local_pipeline

    torch.set_num_threads(1)
    with open_checkpoint(resolve(parse_reference(str(base)), load_settings())) as checkpoint:
        prepared = PreparedRun(plan, ExampleSet(examples, 0, 0), (), base, "")
        return open_local_pipeline(checkpoint, prepared, LocalOptions(), recomputes=False).learn


def _open_peft(base: Path, plan: FinetunePlan) -> Callable[[int, Sequence[MicroBatch]], None]:
    import peft
    import torch
    import transformers

    lora = plan.lora
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        peft.LoraConfig(
            r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.rate)

    def learn(step: int, batches: Sequence[MicroBatch]) -> None:
        optimizer.zero_grad()
        for batch in batches:
            ids, mask, labels = _padded(batch)
            loss = model(
                input_ids=torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                labels=torch.from_numpy(labels),
                num_items_in_batch=batch.total,
            ).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, plan.clip)
        optimizer.step()

    return learn


def _padded(batch: MicroBatch) -> tuple[Any, Any, Any]:
    count, longest = len(batch.lengths), max(batch.lengths)
    ids = np.zeros((count, longest), dtype=np.int64)
    mask, labels = np.zeros_like(ids), np.full_like(ids, -100)
    flat = np.full(len(batch.ids) + 1, -100, dtype=np.int64)
    flat[batch.rows + 1] = batch.targets
    first = 0
    for place, length in enumerate(batch.lengths):
        ids[place, :length] = batch.ids[first : first + length]
        labels[place, 1:length] = flat[first + 1 : first + length]
        mask[place, :length] = 1
        first += length
    return ids, mask, labels


def _workers(bench: FinetuneBench, say: Say) -> list[Result]:
    speeds: dict[int, list[float]] = {1: [], 2: []}
    idle: dict[int, list[tuple[float, ...]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(prefix="sc-") as folder:
        data = write_text(Path(folder) / "data.jsonl")
        for number in range(bench.worker_rounds):
            for workers in speeds:
                say(f"{workers} workers, round {number + 1}")
                out = Path(folder) / f"adapter-{workers}-{number}"
                with serving(str(workers), bench.model_path, cluster_arguments(workers, "native")) as server:
                    speed, shares = _teach(bench, data, out, server.folder, workers)
                speeds[workers].append(speed)
                idle[workers].append(shares)
    return [
        *(
            Result("training speed", statistics.median(each), "tok/s", {"arm": f"{workers} workers", "threads": 1})
            for workers, each in speeds.items()
        ),
        Result("training speed of two workers against one", median_ratio(speeds[2], speeds[1]), "x",
               {"arm": "2 workers", "threads": 1}),
        *(
            Result("idle share of a worker", statistics.median(each), "", {"arm": f"{workers} workers", "stage": place})
            for workers, rounds in idle.items()
            for place, each in enumerate(zip(*rounds, strict=True))
        ),
    ]  # fmt: skip


def _teach(
    bench: FinetuneBench, data: Path, out: Path, cluster: Path, workers: int
) -> tuple[float, tuple[float, ...]]:
    """The median speed of a run's steps, and the share of their time that each worker was idle."""
    options = ("--micro-batches", 8, "--swarm", "--workers", workers, "--data-dir", cluster)
    run = run_finetune(
        bench.model_path, data, out, options, steps=bench.worker_steps, longest=_LONGEST, timeout_s=_RUN_S
    )
    if len(run.speeds) <= _SKIPPED or not run.idle_shares:
        raise BackendError(f"the run with {workers} workers has said too little of its steps")
    return run.median_speed(_SKIPPED), run.idle_shares
