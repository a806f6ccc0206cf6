"""Teach a real model something that nobody has said before, on three workers, and ask it for what it was not shown.

The skill is a language that does not exist: a word stands between a prefix and a suffix. Held-out words are none of
those that are learned from. One process with one thread teaches the same steps, and has to come to the same bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.bench.report import Result, Say
from shardcompute.bench.servers import cluster_arguments, serving
from shardcompute.core.errors import BackendError
from shardcompute.core.settings import load_settings

_BYTES = re.compile(r"\((\d+) bytes\) went between")
_RUN_S = 1800.0
_LONGEST = 64
_LEARNED_TEXT = """
apple river stone table garden window yellow monkey summer winter button camera doctor engine father guitar hammer
island jacket kitten ladder market needle orange pencil rabbit silver ticket valley wallet bottle candle dragon flower
ginger harbor insect jungle kettle lemon mirror nature oyster palace rocket school tunnel violin walnut animal bridge
castle desert eagle forest ghost honey ice jewel king lamp moon night ocean paper queen rain sand tree uncle voice water
bread chair dream earth field grass house juice knife light mouse nurse onion piano quiet radio sheep tiger sugar train
"""
_HELD_OUT_TEXT = """
banana mountain pepper basket cheese dinner finger helmet leather number pillow ribbon saddle turtle velvet wagon
blanket carpet donkey folder magnet pocket rubber shadow temple copper meadow planet spider thunder barrel cotton
feather hunter lizard parrot pigeon salmon tomato wizard
"""

_LEARNED, _HELD_OUT = _LEARNED_TEXT.split(), _HELD_OUT_TEXT.split()


@dataclass(frozen=True, slots=True)
class SkillBench:
    model_path: str
    workers: int = 3
    steps: int = 60
    with_alone: bool = True
    """Teach the same in one process as well."""


def run_skill_bench(bench: SkillBench, say: Say) -> list[Result]:
    labels: dict[str, str | float | int] = {
        "workers": bench.workers,
        "steps": bench.steps,
        "held_out": len(_HELD_OUT),
    }
    with tempfile.TemporaryDirectory(prefix="sc-") as name:
        folder = Path(name)
        data = folder / "zorpish.jsonl"
        data.write_text("\n".join(json.dumps(_line(word)) for word in _LEARNED))
        say(f"teaching on {bench.workers} workers")
        with serving("skill", bench.model_path, cluster_arguments(bench.workers, "native")) as server:
            more = ["--swarm", "--data-dir", str(server.folder)]
            taught_s, said = _teach(bench, data, folder / "swarm", more)
        size = _BYTES.search(said)
        if size is None:
            raise BackendError(f"the run has not said what it sent: {said[-500:]}")
        say("asking for held-out words")
        held_out = folder / "held-out.jsonl"
        held_out.write_text("\n".join(json.dumps(_line(word)) for word in _HELD_OUT))
        before, after = _accuracies(bench.model_path, folder / "swarm", held_out)
        results = [
            Result("held-out accuracy", before, "", {"arm": "before", **labels}),
            Result("held-out accuracy", after, "", {"arm": "after", **labels}),
            Result("time of the run", taught_s, "s", {"arm": "swarm", **labels}),
            Result("bytes between stages", int(size[1]), "bytes", {"arm": "swarm", **labels}),
        ]
        if bench.with_alone:
            say("teaching the same in one process")
            alone_s, _ = _teach(bench, data, folder / "alone", ["--threads", "1"])
            files = [folder / arm / "adapter_model.safetensors" for arm in ("swarm", "alone")]
            is_equal = files[0].read_bytes() == files[1].read_bytes()
            results += [
                Result("time of the run", alone_s, "s", {"arm": "one process", **labels}),
                Result("bytes equal to one process", float(is_equal), "", {"arm": "swarm", **labels}),
            ]
    return results


def _line(word: str) -> dict[str, str]:
    return {"prompt": f"Say {word} in Zorpish.", "completion": translate(word)}


def translate(word: str) -> str:
    """The made-up language."""
    return f"zu-{word}-om"


def _teach(bench: SkillBench, data: Path, out: Path, more: Sequence[str]) -> tuple[float, str]:
    command = [
        sys.executable, "-m", "shardcompute", "finetune", bench.model_path, data, "--out", out, "--rate", "1e-3",
        "--steps", bench.steps, "--batch", 8, "--micro-batches", 4, "--no-samples", "--max-length", _LONGEST, *more,
    ]  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=_RUN_S, check=False
    )
    if done.returncode:
        raise BackendError(f"the run failed: {done.stderr[-500:]}")
    return time.monotonic() - started, done.stderr


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
    for word, both in zip(_HELD_OUT, answers, strict=True):
        for place, ids in enumerate(both):
            right[place] += tokenizer.decode(ids).strip() == translate(word)
    return right[0] / len(_HELD_OUT), right[1] / len(_HELD_OUT)
