"""A last stage with a draft head: what it drafts depends on the session's text alone, however that came about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Draft, Opening, Picked, Prefix, SessionRows
from shardcompute.models.spec import head_stage
from shardcompute.runtime import shard
from shardcompute.runtime.draft_backlog import DraftBacklog
from shardcompute.runtime.head_drafter import HeadDrafter, HeadDraftLimits
from shardcompute.runtime.shard import build_head_drafter, open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint
from support.models.deferred import DeferredExecutor
from support.models.draft_heads import random_draft_head
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import open_tiny

OPTIONS = ExecutorOptions(kv_bytes=1 << 22, context_length=256, max_rows=96)
PROMPT = tuple(4 * i % 200 for i in range(3, 60))
DRAFTED = 4
Frames = list[tuple[SessionRows, list[Picked]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with open_tiny(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=2)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of random weights is sure of nothing."""
    monkeypatch.setattr(shard, "HeadDraftLimits", partial(HeadDraftLimits, confidence=0.0))


def open_drafter(checkpoint: Checkpoint) -> HeadDrafter:
    spec = checkpoint.spec
    source, weights = checkpoint.source(head_stage(spec)), random_draft_head(spec)
    return build_head_drafter(spec, source, weights, backend="numpy", options=OPTIONS)


def open_stage(checkpoint: Checkpoint, *, has_drafter: bool = True) -> StageRuntime:
    executor = open_shard(checkpoint, backend="numpy", options=OPTIONS)
    drafter = open_drafter(checkpoint) if has_drafter else None
    return StageRuntime(executor, is_first=True, is_last=True, drafter=drafter)


def opening(session: int, length: int = len(PROMPT)) -> Opening:
    return Opening(session, Sampling(temperature=0.0), length)


def answer(
    stage: StageRuntime, session: int, rounds: int, prompt: Sequence[int] = PROMPT
) -> tuple[Frames, list[Draft]]:
    """The frames of a session whose drafts go round, and its last draft."""
    known, frames, drafts, openings = list(PROMPT), [], [], [opening(session)]
    work = SessionRows(session, 0, PROMPT, 1, head_draft_tokens=DRAFTED)
    for _ in range(rounds):
        picked = compute(stage, work, openings)
        frames.append((work, picked))
        known += accepted(work, picked)
        drafts = stage.draft([work])
        [draft] = drafts
        assert draft.start == len(known)
        ids = (known[-1], *draft.ids)
        work, openings = SessionRows(session, len(known) - 1, ids, len(ids), head_draft_tokens=DRAFTED), []
    return frames, drafts


def compute(stage: StageRuntime, work: SessionRows, openings: Sequence[Opening] = ()) -> list[Picked]:
    picked = stage.step([work], openings, None)
    assert isinstance(picked, list)
    stage.remember([work], picked)
    return picked


def accepted(work: SessionRows, picked: Sequence[Picked]) -> list[int]:
    tokens = [picked[0].choice.id]
    for draft, following in zip(work.ids[len(work.ids) - work.logit_rows + 1 :], picked[1:], strict=True):
        if draft != tokens[-1]:
            break
        tokens.append(following.choice.id)
    return tokens


def text_of(frames: Frames) -> list[int]:
    tokens = list(frames[0][0].ids)
    for work, picked in frames:
        tokens += accepted(work, picked)
    return tokens


def drafted_at_once(checkpoint: Checkpoint, tokens: Sequence[int], session: int = 1) -> tuple[int, ...]:
    """What is drafted behind a text that is computed in one go, but for its last token, which is picked."""
    stage = open_stage(checkpoint)
    work = SessionRows(session, 0, tuple(tokens[:-1]), 1, head_draft_tokens=DRAFTED)
    [pick] = compute(stage, work, [opening(session, len(tokens) - 1)])
    assert pick.choice.id == tokens[-1]
    [draft] = stage.draft([work])
    stage.close()
    return draft.ids


def test_rejected_drafts_leave_no_trace(checkpoint: Checkpoint) -> None:
    stage = open_stage(checkpoint)
    frames, [draft] = answer(stage, 1, 6)
    assert any(work.logit_rows > len(accepted(work, picked)) for work, picked in frames), "some were wrong"
    assert draft.ids == drafted_at_once(checkpoint, text_of(frames))


def test_a_text_without_its_beginning_is_drafted_for_otherwise(checkpoint: Checkpoint) -> None:
    """Or none of these tests could fail."""
    whole, stage = open_stage(checkpoint), open_stage(checkpoint)
    stage.step([SessionRows(1, 0, PROMPT[:-8])], [opening(1)], None)
    whole.step([SessionRows(1, 0, PROMPT[:-8])], [opening(1)], None)
    whole.remember([SessionRows(1, 0, PROMPT[:-8])], [])
    work = SessionRows(1, len(PROMPT) - 8, PROMPT[-8:], 1, head_draft_tokens=DRAFTED)
    for each in (whole, stage):
        compute(each, work)
    assert whole.draft([work]) != stage.draft([work])


def test_a_stage_that_is_replayed_to_drafts_as_the_one_before_it(checkpoint: Checkpoint) -> None:
    stage, heir = open_stage(checkpoint), open_stage(checkpoint)
    frames, drafts = answer(stage, 1, 4)
    tokens = text_of(frames)
    # All rows in pieces, none of whose picks anybody wants; then the last one.
    for first in range(0, len(tokens) - 2, 20):
        part = tuple(tokens[first : min(first + 20, len(tokens) - 2)])
        compute(heir, SessionRows(1, first, part), [opening(1)] if first == 0 else [])
    last = SessionRows(1, len(tokens) - 2, (tokens[-2],), 1, head_draft_tokens=DRAFTED)
    [pick] = compute(heir, last)
    assert pick.choice.id == tokens[-1]
    assert heir.draft([last]) == drafts


def test_a_drafter_that_comes_later_is_told_what_it_missed(checkpoint: Checkpoint) -> None:
    stage = open_stage(checkpoint, has_drafter=False)
    stage.await_drafter()
    work = SessionRows(1, 0, PROMPT[:-1])
    compute(stage, work, [opening(1)])
    compute(stage, SessionRows(3, 0, PROMPT[:9]), [opening(3)])
    stage.close_sessions([3])
    assert stage.draft([replace(work, head_draft_tokens=DRAFTED)]) == []
    drafter = open_drafter(checkpoint)
    stage.draft_with(drafter)
    assert drafter.sessions() == [1]
    last = SessionRows(1, len(PROMPT) - 1, PROMPT[-1:], 1, head_draft_tokens=DRAFTED)
    [pick] = compute(stage, last)
    [draft] = stage.draft([last])
    assert draft.ids == drafted_at_once(checkpoint, [*PROMPT, pick.choice.id])


def test_what_waits_for_a_drafter_is_bounded(checkpoint: Checkpoint) -> None:
    stage = open_stage(checkpoint)
    work = [SessionRows(session, 0, PROMPT) for session in (1, 2, 3)]
    backlog = DraftBacklog(most_bytes=2 * len(PROMPT) * (2 * checkpoint.spec.hidden + 4))
    for part in work:
        stage.step([part], [opening(part.session)], None)
        backlog.remember([part], [], stage._executor.final_rows())
    drafter = open_drafter(checkpoint)
    backlog.tell(drafter)
    assert drafter.sessions() == [2, 3]


def test_no_drafter_comes(checkpoint: Checkpoint) -> None:
    stage = open_stage(checkpoint, has_drafter=False)
    stage.await_drafter()
    work = SessionRows(1, 0, PROMPT, 1, head_draft_tokens=DRAFTED)
    compute(stage, work, [opening(1)])
    stage.draft_with(None)
    assert stage.draft([work]) == []


@pytest.mark.parametrize("is_moved", [False, True])
def test_sessions_that_share_a_prefix_share_what_is_remembered(
    checkpoint: Checkpoint, is_moved: bool
) -> None:
    stage = open_stage(checkpoint)
    compute(stage, SessionRows(1, 0, PROMPT), [opening(1)])
    rest = (5, 9, 13)
    begun = replace(opening(2), prefix=Prefix(1, len(PROMPT), is_moved))
    work = SessionRows(2, len(PROMPT), rest, 1, head_draft_tokens=DRAFTED)
    [pick] = compute(stage, work, [begun])
    [draft] = stage.draft([work])
    assert draft.ids == drafted_at_once(checkpoint, [*PROMPT, *rest, pick.choice.id], 2)


def test_sessions_are_drafted_for_together_as_alone(checkpoint: Checkpoint) -> None:
    stage = open_stage(checkpoint)
    work = [
        SessionRows(session, 0, PROMPT[: 9 * session], 1, head_draft_tokens=DRAFTED) for session in (1, 2, 3)
    ]
    picked = stage.step(work, [opening(part.session) for part in work], None)
    assert isinstance(picked, list)
    stage.remember(work, picked)
    found = stage.draft(work)
    assert [each.ids for each in found] == [
        drafted_at_once(checkpoint, [*part.ids, pick.choice.id], part.session)
        for part, pick in zip(work, picked, strict=True)
    ]


def test_ended_sessions_are_forgotten(checkpoint: Checkpoint) -> None:
    drafter = open_drafter(checkpoint)
    device = DeferredExecutor(open_shard(checkpoint, backend="numpy", options=OPTIONS))
    stage = StageRuntime(device, is_first=True, is_last=True, drafter=drafter)
    work = [SessionRows(session, 0, PROMPT, 1, head_draft_tokens=DRAFTED) for session in (1, 2)]
    pending = stage.begin(work, [opening(1), opening(2)], None)
    stage.close_sessions([1])
    picked = stage.finish(pending)
    assert isinstance(picked, list)
    stage.remember(pending.work, picked)
    assert drafter.sessions() == [2]
    assert [draft.session for draft in stage.draft(pending.work)] == [2]
    stage.reset()
    assert drafter.sessions() == []


def test_a_device_with_steps_under_way_is_not_held_up_where_nobody_drafts(checkpoint: Checkpoint) -> None:
    drafter = open_drafter(checkpoint)
    device = DeferredExecutor(open_shard(checkpoint, backend="numpy", options=OPTIONS))
    stage = StageRuntime(device, is_first=True, is_last=True, drafter=drafter)
    frames = {
        SessionRows(1, 0, PROMPT, 1): False,
        SessionRows(1, len(PROMPT), (7,), 1): True,
        SessionRows(1, len(PROMPT) + 1, (7,), 1, head_draft_tokens=DRAFTED): False,
    }
    for work, may_overlap in frames.items():
        pending = stage.begin([work], [] if work.start else [opening(1)], None)
        assert stage.can_begin_after(pending) == may_overlap
        stage.finish(pending)
