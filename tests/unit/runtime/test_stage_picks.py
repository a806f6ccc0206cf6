"""A stage whose device picks tokens: the same ones, and steps that go on from them before the host has seen them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import Settings
from shardcompute.core.steps import PICKED, Opening, SessionRows
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.deferred import PickingDevice
from support.models.tiny_checkpoint import save_tiny_llama

OPTIONS = ExecutorOptions(kv_bytes=1 << 22, context_length=200, max_rows=32)
PROMPTS = {1: (10, 20, 30, 40, 50), 2: (7, 8, 9)}
GREEDY = Sampling()
PENALISED = Sampling(frequency_penalty=1.5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=2)
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder.parent))) as opened:
        yield opened


def open_device(checkpoint: Checkpoint, unsure: set[int] | None = None) -> tuple[StageRuntime, PickingDevice]:
    inner = open_shard(checkpoint, backend="numpy", options=OPTIONS)
    device = PickingDevice(inner=inner, unsure_steps=unsure or set())
    return StageRuntime(device, is_first=True, is_last=True), device


def answers(
    stage: StageRuntime, samplings: dict[int, Sampling], count: int, *, ahead: bool
) -> list[list[int]]:
    """Tokens of each step for all sessions; `ahead`: a step is begun before the one before is finished."""
    work = [SessionRows(session, 0, PROMPTS[session], logit_rows=1) for session in samplings]
    openings = [Opening(session, sampling, len(PROMPTS[session])) for session, sampling in samplings.items()]
    pending, got = stage.begin(work, openings, None), []
    for step in range(count - 1):
        if not ahead:
            got.append([each.choice.id for each in stage.finish(pending)])  # type: ignore[union-attr]
        work = [
            SessionRows(session, len(PROMPTS[session]) + step, (PICKED,), logit_rows=1)
            for session in samplings
        ]
        following = stage.begin(work, [], None)
        if ahead:
            got.append([each.choice.id for each in stage.finish(pending)])  # type: ignore[union-attr]
        pending = following
    return [*got, [each.choice.id for each in stage.finish(pending)]]  # type: ignore[union-attr]


def plain(checkpoint: Checkpoint, samplings: dict[int, Sampling], count: int) -> list[list[int]]:
    executor = open_shard(checkpoint, backend="numpy", options=OPTIONS)
    return answers(StageRuntime(executor, is_first=True, is_last=True), samplings, count, ahead=False)


def test_steps_go_on_from_tokens_on_the_device(checkpoint: Checkpoint) -> None:
    stage, device = open_device(checkpoint)
    samplings = {1: GREEDY, 2: GREEDY}
    assert answers(stage, samplings, 8, ahead=True) == plain(checkpoint, samplings, 8)
    assert device.fed == 14


@pytest.mark.parametrize("unsure", [{0}, {3}, {2, 3, 4}, set(range(30))])
def test_a_step_that_went_on_from_a_wrong_guess_is_computed_again(
    checkpoint: Checkpoint, unsure: set[int]
) -> None:
    stage, device = open_device(checkpoint, unsure)
    samplings = {1: GREEDY, 2: GREEDY}
    assert answers(stage, samplings, 8, ahead=True) == plain(checkpoint, samplings, 8)
    assert device.steps > 8


def test_what_the_host_must_pick_is_waited_for(checkpoint: Checkpoint) -> None:
    stage, device = open_device(checkpoint)
    assert answers(stage, {1: PENALISED}, 8, ahead=True) == plain(checkpoint, {1: PENALISED}, 8)
    assert device.fed == 0
    mixed = {1: PENALISED, 2: GREEDY}
    stage, _ = open_device(checkpoint)
    assert answers(stage, mixed, 8, ahead=True) == plain(checkpoint, mixed, 8)


def test_scored_rows_come_with_their_logits(checkpoint: Checkpoint) -> None:
    stage, _ = open_device(checkpoint)
    work = SessionRows(1, 0, (10, 20, 30), logit_rows=2, targets=(30, 40))
    scored = stage.step([work], [Opening(1, GREEDY, 3)], None)
    assert isinstance(scored, list)
    assert [each.choice.id for each in scored] == [30, 40]
    assert all(each.choice.logprob is not None for each in scored)
