"""Teach a real model something that nobody has said before, on three workers, and ask it for what it was not shown.

The skill is a language that does not exist: a word stands between a prefix and a suffix. Held-out words are none of
those that are learned from. One process with one thread teaches the same steps, and has to come to the same bytes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.bench.finetune.skill_words import HELD_OUT, LEARNED
from shardcompute.bench.finetune.taught_run import TaughtRun, run_finetune
from shardcompute.bench.report import Result, Say
from shardcompute.bench.servers import cluster_arguments, serving
from shardcompute.core.errors import BackendError
from shardcompute.core.settings import load_settings

_RUN_S = 1800.0
_LONGEST = 64


@dataclass(frozen=True, slots=True)
class SkillBench:
    model_path: str
    workers: int = 3
    steps: int = 90
    with_alone: bool = True
    """Teach the same in one process as well."""


def run_skill_bench(bench: SkillBench, say: Say) -> list[Result]:
    labels: dict[str, str | float | int] = {
        "workers": bench.workers,
        "steps": bench.steps,
        "held_out": len(HELD_OUT),
    }
    with tempfile.TemporaryDirectory(prefix="sc-") as name:
        folder = Path(name)
        data = folder / "zorpish.jsonl"
        data.write_text("\n".join(json.dumps(_line(word)) for word in LEARNED))
        say(f"teaching on {bench.workers} workers")
        with serving("skill", bench.model_path, cluster_arguments(bench.workers, "native")) as server:
            more = ["--swarm", "--data-dir", str(server.folder)]
            swarm = _teach(bench, data, folder / "swarm", more)
        if swarm.wire_bytes is None:
            raise BackendError("the run has not said what it sent")
        say("asking for held-out words")
        held_out = folder / "held-out.jsonl"
        held_out.write_text("\n".join(json.dumps(_line(word)) for word in HELD_OUT))
        before, after = _accuracies(bench.model_path, folder / "swarm", held_out)
        results = [
            Result("held-out accuracy", before, "", {"arm": "before", **labels}),
            Result("held-out accuracy", after, "", {"arm": "after", **labels}),
            Result("time of the run", swarm.elapsed_s, "s", {"arm": "swarm", **labels}),
            Result("bytes between stages", swarm.wire_bytes, "bytes", {"arm": "swarm", **labels}),
        ]
        if bench.with_alone:
            say("teaching the same in one process")
            alone = _teach(bench, data, folder / "alone", ["--threads", "1"])
            files = [folder / arm / "adapter_model.safetensors" for arm in ("swarm", "alone")]
            is_equal = files[0].read_bytes() == files[1].read_bytes()
            results += [
                Result("time of the run", alone.elapsed_s, "s", {"arm": "one process", **labels}),
                Result("bytes equal to one process", float(is_equal), "", {"arm": "swarm", **labels}),
            ]
    return results


def _line(word: str) -> dict[str, str]:
    return {"prompt": f"Say {word} in Zorpish.", "completion": translate(word)}


def translate(word: str) -> str:
    """The made-up language."""
    return f"zu-{word}-om"


def _teach(bench: SkillBench, data: Path, out: Path, more: Sequence[object]) -> TaughtRun:
    options = ("--rate", "2e-3", "--micro-batches", 4, *more)
    return run_finetune(
        bench.model_path, data, out, options, steps=bench.steps, longest=_LONGEST, timeout_s=_RUN_S
    )


def _accuracies(model_path: str, adapter: Path, held_out: Path) -> tuple[float, float]:
    """Shares of held-out words whose whole answer is right, without and with the adapter."""
    from shardcompute.finetune.data.dataset import read_dataset
    from shardcompute.finetune.data.examples import make_examples
    from shardcompute.finetune.samples import prompts_of, sample_both
    from shardcompute.weights.checkpoint import open_checkpoint
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    with open_checkpoint(resolve(parse_reference(model_path), load_settings())) as checkpoint:
        tokenizer = checkpoint.tokenizer()
        examples = make_examples(read_dataset(held_out), tokenizer, _LONGEST).examples
        answers = sample_both(checkpoint, adapter, prompts_of(examples, len(examples)), 1)
    right = [0, 0]
    for word, both in zip(HELD_OUT, answers, strict=True):
        for place, ids in enumerate(both):
            right[place] += tokenizer.decode(ids).strip() == translate(word)
    return right[0] / len(HELD_OUT), right[1] / len(HELD_OUT)
