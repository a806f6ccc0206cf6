"""The scheduler alone: what goes into frames, in which order, and what becomes of results."""

from __future__ import annotations

from shardcompute.core.generation import GenerationRequest, TokenChoice
from shardcompute.core.steps import Frame, Picked
from shardcompute.decoding.routing.router import PipeLoad
from shardcompute.node.driver.scheduler import PipeContext, Scheduler, SchedulerLimits
from shardcompute.node.driver.sessions.kv_budget import KvBudget

PIPE = PipeContext(PipeLoad(0, 0, 1))


def request(length: int, **options: object) -> GenerationRequest:
    return GenerationRequest(tuple(range(length)), max_tokens=10, **options)  # type: ignore[arg-type]


def scheduling(limits: SchedulerLimits | None = None, capacity_tokens: int = 10_000) -> Scheduler:
    return Scheduler(limits or SchedulerLimits(), budget=KvBudget(capacity_tokens))


def answer(scheduler: Scheduler, frame: Frame, token: int = 7) -> None:
    """Every logit row picks (or scores) a token."""
    for part in frame.work:
        first = part.start + len(part.ids) - part.logit_rows
        picked = [
            Picked(part.session, first + i, TokenChoice(token), is_scored=bool(part.targets))
            for i in range(part.logit_rows)
        ]
        scheduler.take_results(frame.sequence, picked)


def test_a_prompt_goes_out_in_chunks_and_only_its_end_is_wanted() -> None:
    scheduler = scheduling(SchedulerLimits(chunk_rows=4))
    scheduler.add(request(10))
    frames = [scheduler.next_frame(PIPE) for _ in range(3)]
    assert [[(p.start, len(p.ids), p.logit_rows) for p in f.work] for f in frames if f] == [
        [(0, 4, 0)],
        [(4, 4, 0)],
        [(8, 2, 1)],
    ]
    assert scheduler.next_frame(PIPE) is None, "nothing to do until the token is picked"


def test_a_session_opens_once_and_then_decodes_token_by_token() -> None:
    scheduler = scheduling()
    session = scheduler.add(request(3))
    first = scheduler.next_frame(PIPE)
    assert first is not None
    assert [o.session for o in first.openings] == [session.id]
    answer(scheduler, first, token=42)
    second = scheduler.next_frame(PIPE)
    assert second is not None
    assert (second.work[0].start, second.work[0].ids, second.work[0].logit_rows) == (3, (42,), 1)
    assert second.openings == ()


def test_answers_come_before_prompts_and_prompts_take_what_room_is_left() -> None:
    scheduler = scheduling(SchedulerLimits(chunk_rows=100, shared_rows=8))
    talking = scheduler.add(request(2))
    first = scheduler.next_frame(PIPE)
    assert first is not None
    answer(scheduler, first)
    reading = scheduler.add(request(50))
    mixed = scheduler.next_frame(PIPE)
    assert mixed is not None
    assert [(p.session, len(p.ids)) for p in mixed.work] == [(talking.id, 1), (reading.id, 7)]


def test_sessions_take_turns() -> None:
    scheduler = scheduling(SchedulerLimits(chunk_rows=1))
    ids = [scheduler.add(request(3)).id for _ in range(3)]
    order = [frame.work[0].session for _ in range(6) if (frame := scheduler.next_frame(PIPE))]
    assert order == ids * 2


def test_frames_in_flight_share_the_sessions() -> None:
    scheduler, pipe = scheduling(), PipeContext(PipeLoad(0, 0, 2), depth=2)
    for _ in range(4):
        scheduler.add(request(2))
    first = scheduler.next_frame(pipe)
    assert first is not None
    answer(scheduler, first)
    halves = [scheduler.next_frame(pipe), scheduler.next_frame(pipe)]
    assert [len(half.work) for half in halves if half] == [2, 2]
    assert scheduler.next_frame(pipe) is None


def test_new_sessions_wait_for_memory_but_one_always_runs() -> None:
    scheduler = scheduling(capacity_tokens=20)
    scheduler.add(request(50))
    scheduler.add(request(50))
    frame = scheduler.next_frame(PIPE)
    assert frame is not None
    assert len(frame.work) == 1
    assert len(scheduler.waiting) == 1


def test_the_youngest_makes_room_and_computes_everything_again() -> None:
    scheduler = scheduling()
    scheduler.add(request(4))
    young = scheduler.add(request(6))
    frame = scheduler.next_frame(PIPE)
    assert frame is not None
    answer(scheduler, frame, token=9)
    blocked = scheduler.next_frame(PIPE)
    assert blocked is not None
    scheduler.undo(blocked)
    assert scheduler.preempt() is young
    again = [scheduler.next_frame(PIPE), scheduler.next_frame(PIPE)]
    redone = [p for f in again if f for p in f.work if p.session == young.id]
    assert [(p.start, p.ids) for p in redone] == [(0, (*range(6), 9))]
    assert any(o.session == young.id for f in again if f for o in f.openings), "the tail must be told again"


def test_prompt_tokens_are_scored_against_the_next_one() -> None:
    scheduler = scheduling(SchedulerLimits(max_logit_rows=3))
    scheduler.add(request(6, prompt_logprobs=1))
    work = []
    while frame := scheduler.next_frame(PIPE):
        work += frame.work
        answer(scheduler, frame)
        if not frame.work[0].targets:
            break
    assert [(p.start, p.ids, p.targets) for p in work] == [
        (0, (0, 1, 2), (1, 2, 3)),
        (3, (3, 4), (4, 5)),
        (5, (5,), ()),
    ]


def test_results_of_a_session_that_left_are_dropped() -> None:
    scheduler = scheduling()
    session = scheduler.add(request(3))
    frame = scheduler.next_frame(PIPE)
    assert frame is not None
    scheduler.remove(session)
    assert scheduler.take_results(frame.sequence, [Picked(session.id, 2, TokenChoice(1))]) == []
    assert scheduler.next_frame(PIPE) is None
