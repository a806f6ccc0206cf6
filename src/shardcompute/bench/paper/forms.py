"""Weight forms of `bench paper`: the same questions of every form, and what each has more or less than the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.bench.paper.intervals import Interval, paired_difference, perplexity, wilson
from shardcompute.bench.paper.tasks import MOST_ROWS, read_task, right_answers, task_files
from shardcompute.bench.quality import Text, read_texts, score_text
from shardcompute.bench.report import Result, Say
from shardcompute.core.errors import UsageError
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.resolve import ModelFiles

LAMBADA = "lambada"


@dataclass(frozen=True, slots=True)
class FormBench:
    """The first form is what the others are compared with."""

    files: Callable[[], ModelFiles]
    data: Path
    forms: Sequence[str] = ("float32", "int8", "mixed")
    texts: int = 150
    questions: int = 40
    threads: int = 2

    def __post_init__(self) -> None:
        if not (self.data / f"{LAMBADA}.jsonl").is_file() or not task_files(self.data):
            raise UsageError(
                f"{self.data} has no lambada.jsonl and bbh_*.jsonl",
                hint="give a folder that has, with --data",
            )


@dataclass(slots=True)
class _Scores:
    """Of one form: by task, which questions it has right; of LAMBADA, also how unlikely the texts are."""

    right: dict[str, list[bool]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def run_forms(bench: FormBench, say: Say) -> list[Result]:
    scores = {form: _measure(bench, form, say) for form in bench.forms}
    base = scores[bench.forms[0]]
    return [result for form, each in scores.items() for result in _results(form, each, base, bench.forms[0])]


def _measure(bench: FormBench, form: str, say: Say) -> _Scores:
    say(f"loading {form}")
    scores = _Scores()
    with open_checkpoint(bench.files()) as checkpoint:
        options = ExecutorOptions(
            kv_bytes=1 << 30, context_length=MOST_ROWS, max_logit_rows=MOST_ROWS, threads=bench.threads
        )
        executor = open_shard(checkpoint, form=form, options=options)
        tokenizer = checkpoint.tokenizer()
        texts = read_texts(bench.data / f"{LAMBADA}.jsonl", tokenizer, bench.texts)
        tasks = {
            name: read_task(path, tokenizer, bench.questions) for name, path in task_files(bench.data).items()
        }
    try:
        _measure_texts(executor, texts, scores)
        say(f"{form}: {len(texts)} texts of LAMBADA")
        for name, questions in tasks.items():
            scores.right[name] = right_answers(executor, questions)
            say(f"{form}: {len(questions)} questions of {name}")
    finally:
        executor.close()
    return scores


def _measure_texts(executor: Executor, texts: Sequence[Text], scores: _Scores) -> None:
    hits = []
    for text in texts:
        loss, is_hit = score_text(executor, text)
        scores.losses.append(loss)
        scores.tokens.append(len(text.ids) - 1)
        hits.append(is_hit)
    scores.right[LAMBADA] = hits


def _results(form: str, scores: _Scores, base: _Scores, base_form: str) -> list[Result]:
    results = []
    for task, right in scores.right.items():
        labels = {"form": form, "task": task, "questions": len(right)}
        results += _bounded("accuracy", wilson(sum(right), len(right)), "fraction", labels)
        if form != base_form:
            found = paired_difference(right, base.right[task])
            results += _bounded("accuracy_change", found, "fraction", labels)
    labels = {"form": form, "task": LAMBADA, "questions": len(scores.losses)}
    return [*results, *_bounded("perplexity", perplexity(scores.losses, scores.tokens), "", labels)]


def _bounded(metric: str, found: Interval, unit: str, labels: Mapping[str, object]) -> list[Result]:
    return [
        Result(metric, found.value, unit, dict(labels)),
        Result(f"{metric}_low", found.low, unit, dict(labels)),
        Result(f"{metric}_high", found.high, unit, dict(labels)),
    ]
