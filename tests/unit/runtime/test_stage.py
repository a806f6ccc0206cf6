"""Steps of a stage that are begun and finished apart: same tokens, in order, whatever goes on in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcompute.backends.executor import ExecutorOptions, refuse_final_rows
from shardcompute.core.errors import BackendError, RowGapError, UsageError
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import Settings
from shardcompute.core.steps import PICKED, Opening, Picked, SessionRows
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import PendingFrame, StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.deferred import DeferredExecutor
from support.models.tiny_checkpoint import save_tiny_llama

OPTIONS = ExecutorOptions(kv_bytes=1 << 22, context_length=200, max_rows=32)
PROMPT = (10, 20, 30, 40, 50)
OTHER = (7, 8, 9)
SAMPLING = Sampling(temperature=0.9, seed=11, frequency_penalty=0.4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=2)
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder.parent))) as opened:
        yield opened


def open_stage(checkpoint: Checkpoint) -> tuple[StageRuntime, DeferredExecutor]:
    device = DeferredExecutor(open_shard(checkpoint, backend="numpy", options=OPTIONS))
    return StageRuntime(device, is_first=True, is_last=True), device


def open_plain(checkpoint: Checkpoint) -> StageRuntime:
    executor = open_shard(checkpoint, backend="numpy", options=OPTIONS)
    return StageRuntime(executor, is_first=True, is_last=True)


def opening(session: int, prompt: tuple[int, ...] = PROMPT) -> Opening:
    return Opening(session, SAMPLING, len(prompt))


def prompt_rows(session: int, prompt: tuple[int, ...] = PROMPT) -> SessionRows:
    return SessionRows(session, 0, prompt, logit_rows=1)


def continued(session: int, start: int) -> SessionRows:
    return SessionRows(session, start, (PICKED,), logit_rows=1)


def ids_of(picked: object) -> list[int]:
    assert isinstance(picked, list)
    return [each.choice.id for each in picked]


def answer(stage: StageRuntime, session: int, prompt: tuple[int, ...], count: int) -> list[int]:
    """What a stage says when its driver sends each token."""
    tokens, openings = list(prompt), [opening(session, prompt)]
    work = prompt_rows(session, prompt)
    for _ in range(count):
        tokens += ids_of(stage.step([work], openings, None))
        work, openings = SessionRows(session, len(tokens) - 1, (tokens[-1],), logit_rows=1), []
    return tokens[len(prompt) :]


@pytest.mark.parametrize("is_device", [True, False])
def test_a_continued_session_gets_the_tokens_that_it_would_have_got(
    checkpoint: Checkpoint, is_device: bool
) -> None:
    expected = answer(open_plain(checkpoint), 1, PROMPT, 8)
    stage = open_stage(checkpoint)[0] if is_device else open_plain(checkpoint)
    assert stage.can_continue
    pending = stage.begin([prompt_rows(1)], [opening(1)], None)
    picked: list[int] = []
    for step in range(7):
        following = stage.begin([continued(1, len(PROMPT) + step)], [], None)
        picked += ids_of(stage.finish(pending))
        pending = following
    assert [*picked, *ids_of(stage.finish(pending))] == expected


def test_the_next_step_is_launched_before_the_one_before_is_waited_for(checkpoint: Checkpoint) -> None:
    stage, device = open_stage(checkpoint)
    first = stage.begin([prompt_rows(1)], [opening(1)], None)
    assert stage.can_begin_after(first)
    assert not first.is_ready()
    second = stage.begin([prompt_rows(2, OTHER)], [opening(2, OTHER)], None)
    assert device.order == ["launched", "launched"]
    got = ids_of(stage.finish(first)) + ids_of(stage.finish(second))
    assert got == answer(open_plain(checkpoint), 1, PROMPT, 1) + answer(open_plain(checkpoint), 2, OTHER, 1)


def test_a_session_that_ends_while_its_step_is_under_way_is_forgotten_after_it(
    checkpoint: Checkpoint,
) -> None:
    stage, _ = open_stage(checkpoint)
    pending = stage.begin([prompt_rows(1)], [opening(1)], None)
    stage.close_sessions([1])
    assert len(ids_of(stage.finish(pending))) == 1
    assert stage.session_lengths() == {}
    with pytest.raises(UsageError, match="never opened"):
        stage.step([SessionRows(1, 0, PROMPT, logit_rows=1)], [], None)


def test_what_one_step_failed_with_is_told_of_that_step_alone(checkpoint: Checkpoint) -> None:
    stage, device = open_stage(checkpoint)
    first = stage.begin([prompt_rows(1)], [opening(1)], None)
    second = stage.begin([prompt_rows(2, OTHER)], [opening(2, OTHER)], None)
    device.failure = BackendError("the device is out of memory")
    with pytest.raises(BackendError):
        stage.finish(first)
    assert ids_of(stage.finish(second)) == answer(open_plain(checkpoint), 2, OTHER, 1)


def test_a_session_cannot_continue_behind_a_step_that_failed(checkpoint: Checkpoint) -> None:
    stage, device = open_stage(checkpoint)
    stage.step([prompt_rows(1)], [opening(1)], None)
    pending = stage.begin([continued(1, len(PROMPT))], [], None)
    device.failure = BackendError("lost")
    with pytest.raises(RowGapError):
        stage.begin([continued(1, len(PROMPT) + 1)], [], None)
    with pytest.raises(BackendError):
        stage.finish(pending)


def test_only_a_whole_chain_continues(checkpoint: Checkpoint) -> None:
    executor = open_shard(checkpoint, stage=Stage(0, 1, 2), backend="numpy", options=OPTIONS)
    stage = StageRuntime(executor, is_first=True, is_last=False)
    assert not stage.can_continue
    with pytest.raises(UsageError, match="one stage"):
        stage.begin([continued(1, 0)], [], None)


def test_steps_that_keep_hidden_states_are_finished_first(checkpoint: Checkpoint) -> None:
    stage, _ = open_stage(checkpoint)
    wanting = Opening(1, Sampling(wants_hidden=True), len(PROMPT))
    pending: PendingFrame = stage.begin([SessionRows(1, 0, PROMPT[:3], logit_rows=1)], [wanting], None)
    assert not stage.can_begin_after(pending)
    stage.finish(pending)
    pending = stage.begin([SessionRows(1, 3, PROMPT[3:], logit_rows=1)], [], None)
    assert not stage.can_begin_after(pending)
    picked = stage.finish(pending)
    assert isinstance(picked, list)
    assert isinstance(picked[0], Picked)
    assert picked[0].choice.hidden
    assert not open_plain(checkpoint).can_begin_after(pending)


def test_final_states_are_read_before_the_next_step_overwrites_them(checkpoint: Checkpoint) -> None:
    wanting = [Opening(1, Sampling(wants_states=True), len(PROMPT))]
    rows = SessionRows(1, 0, PROMPT[:-1], logit_rows=4, targets=PROMPT[1:])
    scored = open_plain(checkpoint).step([rows], wanting, None)
    stage, _ = open_stage(checkpoint)
    assert not stage.can_begin_after(stage.begin([rows], wanting, None))
    stage, _ = open_stage(checkpoint)
    assert stage.step([rows], wanting, None) == scored
    assert isinstance(scored, list)
    assert {len(each.choice.hidden) for each in scored} == {2 * checkpoint.spec.hidden}
    assert len({each.choice.hidden for each in scored}) == 4


def test_a_backend_without_final_states_fails_nobody(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_shard(checkpoint, backend="numpy", options=OPTIONS)

    def refuse() -> None:
        raise refuse_final_rows("it")

    monkeypatch.setattr(executor, "final_rows", refuse)
    stage = StageRuntime(executor, is_first=True, is_last=True)
    openings = [Opening(1, Sampling(wants_states=True), len(PROMPT)), opening(2, OTHER)]
    picked = stage.step([prompt_rows(1), prompt_rows(2, OTHER)], openings, None)
    assert isinstance(picked, list)
    assert [each.choice.hidden for each in picked] == [b"", b""]
    assert ids_of(picked)[1:] == answer(open_plain(checkpoint), 2, OTHER, 1)
