"""The drafter that comes with the package: made for the embedded model, often right, and never heard in the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import Settings
from shardcompute.core.steps import Opening, Picked, SessionRows
from shardcompute.models.draft_head import decode_draft_head
from shardcompute.models.spec import head_stage
from shardcompute.node.weights.draft_heads import packaged_draft_head
from shardcompute.runtime.shard import build_head_drafter, open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

OPTIONS = ExecutorOptions(kv_bytes=64 << 20, max_rows=128, max_logit_rows=16, context_length=512)
QUESTION = "Write a short Python function that adds two numbers, and explain how it works."
TOKENS, DRAFT_TOKENS = 64, 6


@pytest.fixture(scope="module")
def checkpoint(smollm2_gguf: Path) -> Iterator[Checkpoint]:
    files = resolve(parse_reference(str(smollm2_gguf)), Settings(data_dir=smollm2_gguf.parent))
    with open_checkpoint(files) as opened:
        yield opened


@pytest.fixture(scope="module")
def runtime(checkpoint: Checkpoint) -> Iterator[StageRuntime]:
    content = packaged_draft_head(checkpoint)
    assert content is not None, "nothing comes with the package for the embedded model"
    weights = decode_draft_head(content, checkpoint.spec.hidden)
    source = checkpoint.source(head_stage(checkpoint.spec))
    drafter = build_head_drafter(checkpoint.spec, source, weights, backend="onnx", options=OPTIONS)
    executor = open_shard(checkpoint, options=OPTIONS)
    runtime = StageRuntime(executor, is_first=True, is_last=True, drafter=drafter)
    yield runtime
    runtime.close()


def answer(runtime: StageRuntime, prompt: list[int], session: int, most: int) -> tuple[list[int], int]:
    """The greedy answer with so many drafted tokens to a step, and how many steps it took."""
    opening = Opening(session, Sampling(temperature=0.0), len(prompt))
    work, steps = SessionRows(session, 0, tuple(prompt), 1, head_draft_tokens=most), 0
    known = list(prompt)
    while len(known) < len(prompt) + TOKENS:
        picked = runtime.step([work], [] if steps else [opening], None)
        assert isinstance(picked, list)
        steps += 1
        known += _accepted(work, picked)
        runtime.remember([work], picked)
        found = runtime.draft([work])
        drafts = found[0].ids if found else ()
        assert not found or found[0].start == len(known)
        ids = (known[-1], *drafts)
        work = SessionRows(session, len(known) - 1, ids, len(ids), head_draft_tokens=most)
    runtime.close_sessions([session])
    return known[len(prompt) :][:TOKENS], steps


def _accepted(work: SessionRows, picked: list[Picked]) -> list[int]:
    tokens = [picked[0].choice.id]
    for draft, following in zip(work.ids[len(work.ids) - work.logit_rows + 1 :], picked[1:], strict=True):
        if draft != tokens[-1]:
            break
        tokens.append(following.choice.id)
    return tokens


def test_drafts_save_steps_and_change_nothing(checkpoint: Checkpoint, runtime: StageRuntime) -> None:
    prompt = checkpoint.tokenizer().encode_chat([{"role": "user", "content": QUESTION}])
    plain, plain_steps = answer(runtime, prompt, 1, 0)
    drafted, steps = answer(runtime, prompt, 2, DRAFT_TOKENS)
    assert drafted == plain
    assert plain_steps == TOKENS
    assert steps < 0.6 * TOKENS, "two tokens in three come of drafts on such text"
