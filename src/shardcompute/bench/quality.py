"""`bench quality`: what each weight form costs, on LAMBADA.

Perplexity is over all tokens of the texts but the first; accuracy counts texts whose last word is what greedy
decoding would write. *Sources* are other checkpoints of the same model, as quantisers publish them: what they cost
themselves, and what a form costs that is made of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array
from shardcompute.bench.report import Result, Say
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.models.spec import whole
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.loader import stored_bytes
from shardcompute.weights.sources.resolve import ModelFiles

_ROWS = 512


@dataclass(frozen=True, slots=True)
class Text:
    ids: Array
    last_word_start: int
    """Index of the first token of the last word."""


def read_texts(path: Path, tokenizer: Tokenizer, count: int) -> list[Text]:
    """The first `count` texts of a JSON-lines file with a `text` each."""
    texts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:count]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="give LAMBADA with --data") from error
    for line in lines:
        text = json.loads(line)["text"]
        start = text.rstrip().rfind(" ")
        head = tokenizer.encode(text[:start])
        ids = [*head, *tokenizer.encode(text[start:], add_special=False)]
        texts.append(Text(np.array(ids[:_ROWS], dtype=np.int64), min(len(head), _ROWS - 1)))
    return texts


def measure_form(
    files: Callable[[], ModelFiles], form: str, data: Path, count: int, threads: int, say: Say
) -> list[Result]:
    """Perplexity, accuracy and size of one weight form."""
    with open_checkpoint(files()) as checkpoint:
        options = ExecutorOptions(
            kv_bytes=1 << 30, context_length=_ROWS, max_logit_rows=_ROWS, threads=threads
        )
        executor = open_shard(checkpoint, form=form, options=options)
        texts = read_texts(data, checkpoint.tokenizer(), count)
        size = _weight_bytes(checkpoint, form)
    losses, hits = 0.0, 0
    tokens = sum(len(text.ids) - 1 for text in texts)
    for number, text in enumerate(texts, start=1):
        loss, is_hit = score_text(executor, text)
        losses += loss
        hits += is_hit
        if number % 50 == 0:
            say(f"{form}: {number} of {len(texts)} texts")
    executor.close()
    labels = {"form": form, "texts": len(texts), "tokens": tokens}
    return [
        Result("perplexity", math.exp(losses / tokens), "", labels),
        Result("lambada_accuracy", hits / len(texts), "fraction", labels),
        Result("weights_size", size / 2**20, "MiB", labels),
    ]


def run_quality_bench(
    files: Callable[[], ModelFiles],
    forms: Sequence[str],
    data: Path,
    count: int,
    threads: int,
    say: Say,
    sources: Mapping[str, Callable[[], ModelFiles]] | None = None,
    keep: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """`keep` is given all that there is after every form and every source: a run of hours may be cut short."""
    results: list[Result] = []
    for form in forms:
        say(f"loading {form}")
        results += measure_form(files, form, data, count, threads, say)
        keep(results)
    base = _perplexity(results, "float32")
    if base is not None:
        results += _changes("perplexity_change", results, base)
    for name, source in (sources or {}).items():
        found: list[Result] = []
        for form in ("native", *(form for form in forms if form not in ("native", "float32"))):
            say(f"loading {form} of {name}")
            found += measure_form(source, form, data, count, threads, say)
        changes = [] if base is None else _changes("perplexity_change", found, base)
        own = _perplexity(found, "native")
        assert own is not None
        changes += _changes("change_from_source", found, own)
        results += [replace(each, labels={**each.labels, "source": name}) for each in (*found, *changes)]
        keep(results)
    return results


def _perplexity(results: Sequence[Result], form: str) -> float | None:
    return next((r.value for r in results if r.metric == "perplexity" and r.labels["form"] == form), None)


def _changes(metric: str, results: Sequence[Result], base: float) -> list[Result]:
    return [
        Result(metric, each.value / base - 1, "fraction", each.labels)
        for each in results
        if each.metric == "perplexity"
    ]


def score_text(executor: Executor, text: Text) -> tuple[float, bool]:
    """The sum of negative log-likelihoods, and whether the last word is what greedy decoding writes."""
    count = len(text.ids) - 1
    logits = executor.step([Segment(0, 0, count, count)], text.ids[:-1])
    targets = text.ids[1:]
    peak = logits.max(axis=-1)
    totals = np.log(np.exp(logits - peak[:, None]).sum(axis=-1, dtype=np.float64)) + peak
    loss = float((totals - logits[np.arange(count), targets]).sum())
    last = slice(text.last_word_start - 1, count)
    is_hit = bool((logits[last].argmax(axis=-1) == targets[last]).all())
    executor.close_session(0)
    return loss, is_hit


def _weight_bytes(checkpoint: Checkpoint, form: str) -> int:
    """What the weights take in this form, before a kernel packs them."""
    return stored_bytes(checkpoint.source(whole(checkpoint.spec), form=form), checkpoint.layout)
