"""Runs `bench drafts`: a model and its draft head in this process, real prompts, and what guesses would have brought.

Costs are processor time of one thread, the least of steps in turns, so that whatever else the machine does hardly
counts. The ring is added as a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.bench.drafts.guesses import (
    DRAFTED,
    AnswerGuesser,
    DraftNetwork,
    GuessedAnswer,
    copy_guesses,
)
from shardcompute.bench.drafts.promises import (
    TripCosts,
    copied_shares,
    drafts_of,
    held_shares,
    promise_shapes,
    right_shares,
    tokens_per_trip,
)
from shardcompute.bench.report import Result, Say
from shardcompute.bench.wan.loops import is_looping
from shardcompute.bench.wan.prompts import read_prompts, sample_prompts
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling
from shardcompute.models.draft_head import DRAFT_HEAD, decode_draft_head
from shardcompute.models.spec import whole
from shardcompute.node.weights.draft_heads import draft_head_attachments
from shardcompute.runtime.shard import DRAFT_HEAD_ROWS, build_draft_network, open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.resolve import ModelFiles

_CONTEXT = 4096
_KV_BYTES = 1 << 28
_COUNTED_ROWS = (1, 2, 3, 4, 5, 6, 8)
_PAST = 256
_REPEATS = 15
_NAMES = ("first", "second", "third")
_TRIP_DRAFTED = 5


@dataclass(frozen=True, slots=True)
class DraftsBench:
    """`heads`: the folder of draft heads that were trained here; None: the packaged one alone. `row_ms`: what rows cost
    elsewhere, besides what they cost here; 0: on a device that computes some as fast as one."""

    files: Callable[[], ModelFiles]
    data: Path
    heads: Path | None = None
    prompts: int = 20
    tokens: int = 128
    temperature: float = 0.0
    seed: int = 1
    ring_ms: Sequence[float] = (20.0, 80.0, 200.0)
    row_ms: Sequence[float] = (4.0, 0.0)


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Processor seconds: of a step without rows, a row, a token's step of the draft head, a further segment."""

    fixed_s: float
    row_s: float
    draft_s: float
    segment_s: float


def run_drafts_bench(bench: DraftsBench, say: Say) -> list[Result]:
    prompts = sample_prompts(read_prompts(bench.data), 0, bench.seed)[: bench.prompts]
    with ExitStack() as stack:
        say("loading")
        checkpoint = stack.enter_context(open_checkpoint(bench.files()))
        context = min(_CONTEXT, checkpoint.spec.context_length)
        options = ExecutorOptions(kv_bytes=_KV_BYTES, context_length=context, threads=1)
        network = _open_network(checkpoint, bench.heads, options)
        stack.callback(network.executor.close)
        stack.callback(network.embedding.close)
        model = open_shard(checkpoint, options=options)
        stack.callback(model.close)
        tokenizer = checkpoint.tokenizer()
        sampling = Sampling(temperature=bench.temperature, seed=bench.seed)
        guesser = AnswerGuesser(model, network, sampling, checkpoint.spec.vocab_size)
        answers = []
        for number, prompt in enumerate(prompts, start=1):
            ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            ids = ids[: context - bench.tokens - DRAFTED]
            tokens, guesses, mixed = guesser.guess(ids, bench.tokens, tokenizer.eos_ids)
            copied = copy_guesses(ids, tokens)
            text = tokenizer.decode(tokens)
            answers.append(GuessedAnswer(prompt.category, text, tokens, guesses, copied, mixed))
            say(f"{number} of {len(prompts)} prompts: {prompt.category}, {len(tokens)} tokens")
        times = _time_steps(model, network, checkpoint.spec.vocab_size)
    return [
        *_times_results(times),
        *_right_results(answers),
        *_mixture_results(answers),
        *_promise_results(answers, times, bench),
    ]


def _open_network(checkpoint: Checkpoint, heads: Path | None, options: ExecutorOptions) -> DraftNetwork:
    attached, problem = draft_head_attachments(checkpoint, heads)
    if DRAFT_HEAD not in attached:
        raise UsageError(
            problem or f"there is no draft head for {checkpoint.name}",
            hint="train one with `shardcompute draft-head train`",
        )
    spec = checkpoint.spec
    weights = decode_draft_head(attached[DRAFT_HEAD], spec.hidden, spec.vocab_size)
    narrow = ExecutorOptions(
        kv_bytes=options.kv_bytes,
        max_rows=DRAFT_HEAD_ROWS,
        max_logit_rows=1,
        context_length=options.context_length,
        threads=options.threads,
    )
    source = checkpoint.source(whole(spec))
    executor, embedding = build_draft_network(spec, source, weights, backend="onnx", options=narrow)
    places = np.full(spec.vocab_size, -1, dtype=np.int32)
    places[weights.ids] = np.arange(len(weights.ids))
    return DraftNetwork(executor, embedding, weights.ids, places, spec.embedding_scale)


def _time_steps(model: Executor, network: DraftNetwork, vocab_size: int) -> _StepTimes:
    """All rows want logits, as those of drafts do. Sessions 1 and 2 have the same past."""
    past = min(_PAST, vocab_size)
    ids = np.arange(past) % vocab_size
    state: Any = np.zeros(0)
    for session in (1, 2):
        model.step([Segment(session, 0, past, 1)], ids, keeps_hidden=True)
        state = np.array(model.final_rows()[0], dtype=np.float32)

    def step(*counts: int) -> Callable[[], object]:
        """So many rows of session 1, and of session 2."""
        segments = [Segment(session, past, count, count) for session, count in enumerate(counts, start=1)]
        return lambda: model.step(segments, ids[: sum(counts)])

    works: dict[object, Callable[[], object]] = {rows: step(rows) for rows in _COUNTED_ROWS}
    works["apart"] = step(4, 1)
    works["draft"] = lambda: network.step(0, [1], [state])
    spent: dict[object, list[float]] = {name: [] for name in works}
    for _ in range(_REPEATS):
        for name, work in works.items():
            began_s = time.process_time()
            work()
            spent[name].append(time.process_time() - began_s)
    # Whatever else goes on only ever makes one slower.
    least_s = {name: min(each) for name, each in spent.items()}
    row_s, fixed_s = np.polyfit(_COUNTED_ROWS, [least_s[rows] for rows in _COUNTED_ROWS], 1)
    segment_s = max(0.0, least_s["apart"] - least_s[5])
    return _StepTimes(max(0.0, float(fixed_s)), max(0.0, float(row_s)), least_s["draft"], segment_s)


def _times_results(times: _StepTimes) -> list[Result]:
    named = {
        "step": times.fixed_s,
        "row": times.row_s,
        "drafted token": times.draft_s,
        "segment": times.segment_s,
    }
    return [
        Result(f"time of a {name}", 1e3 * seconds, "ms", {"of": "all"}) for name, seconds in named.items()
    ]


def _right_results(answers: Sequence[GuessedAnswer]) -> list[Result]:
    """Of all answers by position, of each category at the first one."""
    results = []
    for depth in range(DRAFTED):
        shares = right_shares(answers, depth)
        labels = {"of": "all", "position": depth + 1, "count": shares[-1]}
        results += _shares_results(shares, labels)
    for category in sorted({answer.category for answer in answers}):
        own = [answer for answer in answers if answer.category == category]
        results += _shares_results(right_shares(own, 0), {"of": category, "position": 1})
    offered, right = copied_shares(answers)
    return [
        *results,
        Result("n-gram offers another first token", offered, "fraction", {"of": "all"}),
        Result("n-gram right where it does", right, "fraction", {"of": "all"}),
    ]


def _mixture_results(answers: Sequence[GuessedAnswer]) -> list[Result]:
    """The head alone, and mixed with copies: of all answers by position, of each category at the first one."""
    results = []
    for category in ("all", *sorted({answer.category for answer in answers})):
        own = [answer for answer in answers if category in ("all", answer.category)]
        alone = [(answer.tokens, drafts_of(answer)) for answer in own]
        mixed = [(answer.tokens, answer.mixed) for answer in own]
        for drafter, drafts in (("head", alone), ("mixture", mixed)):
            for depth in range(DRAFTED if category == "all" else 1):
                counted, right = held_shares(drafts, depth)
                labels = {"of": category, "drafter": drafter, "position": depth + 1, "count": counted}
                results.append(Result("drafted right", right, "fraction", labels))
            labels = {"of": category, "drafter": drafter, "drafted": _TRIP_DRAFTED}
            results.append(
                Result("tokens per trip of equal drafts", tokens_per_trip(drafts, _TRIP_DRAFTED), "", labels)
            )
    return results


def _shares_results(shares: Any, labels: dict[str, Any]) -> list[Result]:
    found = [
        Result(f"{name} guess right", shares[rank], "fraction", labels)
        for rank, name in enumerate(_NAMES)
        if rank in shares
    ]
    if shares.get(0, 1.0) < 1.0:
        wrong = shares[1] / (1.0 - shares[0])
        found.append(Result("second right where first is wrong", wrong, "fraction", labels))
    return found


def _promise_results(answers: Sequence[GuessedAnswer], times: _StepTimes, bench: DraftsBench) -> list[Result]:
    looping = sum(is_looping(answer.text) for answer in answers)
    results = [Result("looping answers", looping, f"of {len(answers)}", {"of": "all"})]
    for ring_ms in bench.ring_ms:
        for rows, costs in _costs(ring_ms / 1e3 + times.fixed_s, times, bench.row_ms).items():
            for shape, promise in promise_shapes(answers, costs).items():
                labels = {"shape": shape, "ring_ms": ring_ms, "rows": rows}
                results += [
                    Result("rate", promise.rate, "tok/s", labels),
                    Result("gain", promise.gain, "of draft alone", labels),
                    Result("gain ±", promise.gain_half_interval, "95 %", labels),
                    Result("tokens per trip", promise.tokens_per_trip, "", labels),
                    Result("guesses per trip", promise.rows_per_trip, "", labels),
                ]
    return results


def _costs(fixed_s: float, times: _StepTimes, row_ms: Sequence[float]) -> dict[str, TripCosts]:
    """By what rows cost. Elsewhere a further segment costs nothing, and nothing does where rows are free: at best."""
    costs = {"as measured": TripCosts(fixed_s, times.row_s, times.draft_s, times.segment_s)}
    for cost_ms in row_ms:
        costs[f"{cost_ms:g} ms"] = TripCosts(fixed_s, cost_ms / 1e3, times.draft_s if cost_ms else 0.0)
    return costs
