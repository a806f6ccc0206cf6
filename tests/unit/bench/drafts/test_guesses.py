"""Guesses behind the tokens of an answer, by a tiny model with a random draft head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.bench.drafts.guesses import (
    BEHIND,
    DRAFTED,
    RANKS,
    AnswerGuesser,
    DraftNetwork,
    Guess,
    copy_guesses,
)
from shardcompute.bench.drafts.run import DraftsBench, run_drafts_bench
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import load_settings
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.models.spec import whole
from shardcompute.node.weights.draft_heads import save_draft_head
from shardcompute.runtime.shard import build_draft_network, build_head_drafter, open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import ModelFiles, resolve
from support.models.draft_heads import random_draft_head
from support.models.tiny_checkpoint import save_tiny_llama

PROMPT = (1, 7, 12, 3, 40)
OPTIONS = ExecutorOptions(kv_bytes=1 << 22, max_rows=64, context_length=256)


def files(folder: Path) -> ModelFiles:
    return resolve(parse_reference(str(folder)), load_settings())


def guesser(checkpoint: Checkpoint, sampling: Sampling) -> AnswerGuesser:
    spec = checkpoint.spec
    weights = random_draft_head(spec)
    places = np.full(spec.vocab_size, -1, dtype=np.int32)
    places[weights.ids] = np.arange(len(weights.ids))
    executor, embedding = build_draft_network(
        spec, checkpoint.source(whole(spec)), weights, backend="onnx", options=OPTIONS
    )
    network = DraftNetwork(executor, embedding, weights.ids, places, spec.embedding_scale)
    return AnswerGuesser(open_shard(checkpoint, options=OPTIONS), network, sampling, spec.vocab_size)


def drafted_by_stage(
    checkpoint: Checkpoint, sampling: Sampling, tokens: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """What a last stage drafts behind each token of an answer but the last."""
    spec = checkpoint.spec
    drafter = build_head_drafter(
        spec, checkpoint.source(whole(spec)), random_draft_head(spec), backend="onnx", options=OPTIONS
    )
    stage = StageRuntime(
        open_shard(checkpoint, options=OPTIONS), is_first=True, is_last=True, drafter=drafter
    )
    known, start, drafts = (*PROMPT, *tokens), 0, []
    openings = [Opening(1, sampling, len(PROMPT))]
    for stop in range(len(PROMPT), len(known) - 1):
        work = [SessionRows(1, start, known[start:stop], 1, head_draft_tokens=DRAFTED)]
        picked = stage.step(work, openings, None)
        assert isinstance(picked, list)
        assert picked[0].choice.id == known[stop]
        stage.remember(work, picked)
        made = stage.draft(work)
        drafts.append(made[0].ids if made else ())
        start, openings = stop, []
    stage.close()
    return drafts


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"]
)
def test_mixed_drafts_are_what_a_last_stage_drafts(tmp_path: Path, sampling: Sampling) -> None:
    with open_checkpoint(files(save_tiny_llama(tmp_path / "tiny"))) as checkpoint:
        tokens, guesses, mixed = guesser(checkpoint, sampling).guess(PROMPT, 12, ())
        drafts = drafted_by_stage(checkpoint, sampling, tokens)
    assert len(tokens) == 12
    assert len(guesses) == len(mixed) == len(drafts) == 11
    assert max(len(draft) for draft in drafts) > 1
    for whole_draft, draft in zip(mixed, drafts, strict=True):
        # A stage ends a draft that has become too unlikely.
        assert whole_draft[: len(draft)] == draft


def test_guesses_are_ranked_and_go_on_behind_second_best(tmp_path: Path) -> None:
    with open_checkpoint(files(save_tiny_llama(tmp_path / "tiny"))) as checkpoint:
        _, guesses, _ = guesser(checkpoint, Sampling()).guess(PROMPT, 4, ())
    for guessed in guesses:
        by_path = {guess.path: guess for guess in guessed}
        assert len(by_path) == len(guessed) == RANKS * DRAFTED + 2 * BEHIND
        for depth in range(DRAFTED):
            ranked = [guess for guess in guessed if _is_on_draft(guess, depth)]
            assert [guess.ranks[-1] for guess in ranked] == list(range(RANKS))
            likelihoods = [guess.likelihoods[-1] for guess in ranked]
            assert likelihoods == sorted(likelihoods, reverse=True)
        assert all(len(guess.path) == 1 or guess.path[:-1] in by_path for guess in guessed)
        assert max(len(guess.path) for guess in guessed if guess.ranks[0] == 1) == 1 + BEHIND


def _is_on_draft(guess: Guess, depth: int) -> bool:
    return len(guess.path) == depth + 1 and not any(guess.ranks[:-1])


@pytest.fixture
def bench(tmp_path: Path) -> dict[str, Any]:
    model = save_tiny_llama(tmp_path / "tiny")
    data = tmp_path / "prompts.jsonl"
    rows = [{"id": id, "category": f"kind {id % 2}", "turns": ["abc" * (id + 1)]} for id in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "files": lambda: files(model),
        "data": data,
        "heads": tmp_path / "heads",
        "prompts": 4,
        "tokens": 6,
    }


def test_the_bench_tells_shares_times_and_promises(bench: dict[str, Any]) -> None:
    with open_checkpoint(bench["files"]()) as checkpoint:
        save_draft_head(bench["heads"], checkpoint, random_draft_head(checkpoint.spec))
    results = run_drafts_bench(DraftsBench(**bench, ring_ms=[80.0]), lambda _: None)
    found = {(each.metric, each.labels.get("of"), each.labels.get("position")): each for each in results}
    assert {each.labels["of"] for each in results if "of" in each.labels} == {"all", "kind 0", "kind 1"}
    assert 0 <= found["first guess right", "all", 1].value <= 1
    assert found["time of a step", "all", None].value > 0
    drafted = {
        (each.labels["drafter"], each.labels["of"]) for each in results if each.metric == "drafted right"
    }
    assert drafted == {(drafter, of) for drafter in ("head", "mixture") for of in ("all", "kind 0", "kind 1")}
    promised = [each for each in results if each.metric == "gain"]
    assert {(each.labels["shape"], each.labels["rows"]) for each in promised} == {
        (shape, rows)
        for shape in ("draft", "first", "seconds", "tree")
        for rows in ("as measured", "4 ms", "0 ms")
    }
    free = {each.labels["shape"]: each.value for each in promised if each.labels["rows"] == "0 ms"}
    assert free["draft"] == 0
    assert free["tree"] >= free["first"] >= 0


def test_a_model_without_a_draft_head_is_refused(bench: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no draft head"):
        run_drafts_bench(DraftsBench(**bench), lambda _: None)


def test_text_that_went_on_once_is_copied() -> None:
    # Two tokens that occurred before are followed by what followed them then.
    assert copy_guesses((1, 2, 3, 4), (9, 1, 2, 3, 8)) == (None, None, 3, 4)
