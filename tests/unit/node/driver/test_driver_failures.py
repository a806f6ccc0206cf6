"""The driver when chains break, steps fail and memory is short: the answers stay what they would have been."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import (
    BackendError,
    CapacityError,
    LinkError,
    ShardComputeError,
)
from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.core.steps import Picked
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape
from shardcompute.node.rpc.commands import ShapeChange
from shardcompute.node.rpc.session_ids import Resumption
from support.swarm.fake_chain import (
    PIPELINE,
    SHAPE,
    FakeChain,
    ask,
    connected,
    continuation,
    make_driver,
    submit,
)

# When the chain breaks


def test_a_new_chain_computes_exactly_the_known_tokens_again() -> None:
    driver, lost = connected()
    request = ask(5, 8, sampling=Sampling(temperature=0.5, seed=9))
    session, caller = submit(driver, request)
    lost.run(driver, steps=3)
    assert len(caller.tokens) == 3
    driver.disconnect()
    chain = FakeChain()
    driver.connect(chain, ChainShape(SHAPE.capacity_tokens, max_rows=3))
    chain.run(driver)
    replayed = chain.sent_to(session)[:3]
    known = (*request.prompt, *continuation(request.prompt, 3))
    assert [(p.start, p.ids, p.logit_rows) for p in replayed] == [
        (0, known[:3], 0),
        (3, known[3:6], 0),
        (6, known[6:], 1),
    ]
    openings = [opening for frame in chain.frames for opening in frame.openings]
    assert [(o.session, o.sampling, o.prompt_length) for o in openings] == [(session, request.sampling, 5)]
    assert caller.tokens == continuation(request.prompt, 8)


def test_an_answer_says_who_was_lost_and_who_took_over() -> None:
    driver, lost = connected()
    _, caller = submit(driver, ask(5, 8))
    _, waiting = submit(driver, ask(5, 8, first=2))
    lost.run(driver, steps=3)
    said = len(caller.tokens)
    assert said > 0
    driver.disconnect()
    driver.connect(FakeChain(), SHAPE, change=ShapeChange(("b",), ("c",)))
    driver.disconnect()  # the one who took over is lost too, before it has said anything
    driver.connect(chain := FakeChain(), SHAPE, change=ShapeChange(("c",), ("d",)))
    chain.run(driver)
    told = [delta.interruption for delta in caller.deltas if delta.interruption is not None]
    assert [(each.lost, each.taken_over_by, each.after_tokens) for each in told] == [
        (("b", "c"), ("d",), said)
    ]
    timings = caller.deltas[-1].timings
    assert timings is not None
    assert timings.interrupted_s == told[0].pause_s > 0
    assert timings.decode_s >= 0
    assert waiting.tokens == continuation(ask(5, 8, first=2).prompt, 8)


def test_what_has_not_begun_was_not_interrupted() -> None:
    driver = make_driver()
    _, caller = submit(driver, ask())
    driver.connect(chain := FakeChain(), SHAPE, change=ShapeChange(("b",), ("c",)))
    chain.run(driver)
    assert [delta.interruption for delta in caller.deltas] == [None] * len(caller.deltas)


def test_results_of_a_lost_chain_are_ignored() -> None:
    driver, lost = connected()
    request = ask()
    _, caller = submit(driver, request)
    lost.run(driver, steps=2)
    while lost.compute():
        pass
    driver.disconnect()
    lost.deliver(driver)
    assert len(caller.tokens) == 2
    chain = FakeChain()
    driver.connect(chain, SHAPE)
    for frame in lost.frames:
        driver.take_results(frame.sequence, [Picked(1, 7, TokenChoice(3))])
        driver.step_failed(frame.sequence, LinkError("late news"))
    chain.run(driver)
    assert caller.tokens == continuation(request.prompt, 6)


@pytest.mark.parametrize("steps", range(7))
def test_wherever_the_chain_breaks_nothing_is_said_twice(steps: int) -> None:
    driver, lost = connected(PIPELINE)
    requests = [ask(40, 5), ask(3, 7, first=5)]
    callers = [submit(driver, request)[1] for request in requests]
    lost.run(driver, steps)
    driver.connect(chain := FakeChain(), PIPELINE)  # without a word of the loss
    chain.run(driver)
    for caller, request in zip(callers, requests, strict=True):
        assert caller.tokens == continuation(request.prompt, request.max_tokens)
        assert [len(delta.tokens) for delta in caller.deltas] == [1] * request.max_tokens


def test_cancelling_without_a_chain_leaves_nothing_behind() -> None:
    driver, _ = connected()
    generation, caller = submit(driver, ask())
    driver.disconnect()
    driver.cancel(generation)
    driver.connect(chain := FakeChain(), SHAPE)
    assert chain.frames == []
    assert caller.deltas == []


def test_giving_up_and_closing_tell_everyone() -> None:
    driver, chain = connected(max_sessions=1)
    callers = [submit(driver, ask())[1] for _ in range(2)]
    driver.fail_all(LinkError("the chain will not come back"))
    assert [type(caller.error) for caller in callers] == [LinkError] * 2
    assert driver.load().running == driver.load().waiting == 0
    _, last = submit(driver, ask())
    driver.close()
    assert isinstance(last.error, CapacityError)
    sent = len(chain.frames)
    chain.run(driver)
    assert len(chain.frames) == sent
    with pytest.raises(CapacityError, match="shutting down"):
        submit(driver, ask())


def test_a_repaired_chain_goes_on_where_it_was() -> None:
    driver, chain = connected()
    request = ask(5, 8)
    session, caller = submit(driver, request)
    chain.run(driver, steps=3)
    driver.disconnect()
    frames = len(chain.frames)
    driver.connect(chain, SHAPE, Resumption())
    (frame,) = chain.frames[frames:]
    assert [(p.start, p.ids) for p in frame.work] == [(7, (caller.tokens[-1],))], "the last known token alone"
    assert frame.openings == ()
    chain.run(driver)
    assert caller.tokens == continuation(request.prompt, 8)
    assert chain.replayed == []
    assert chain.closed == [session]


def test_what_a_repaired_chain_does_not_know_any_more_is_computed_again() -> None:
    driver, lost = connected()
    requests = [ask(5, 8), ask(6, 8, first=3), ask(7, 8, first=9)]
    callers = [submit(driver, request)[1] for request in requests]
    lost.run(driver, steps=4)
    driver.disconnect()
    known = {1: 5 + len(callers[0].tokens) - 1, 2: 5}
    frames = len(lost.frames)
    driver.connect(lost, SHAPE, Resumption(known))
    starts = {part.session: part.start for part in lost.frames[frames].work}
    assert starts == {1: known[1], 2: 0, 3: 0}
    assert [opening.session for opening in lost.frames[frames].openings] == [2, 3]
    lost.run(driver)
    assert [c.tokens for c in callers] == [continuation(request.prompt, 8) for request in requests]


def test_a_new_first_stage_is_told_what_the_others_know() -> None:
    driver, chain = connected()
    request = ask(5, 8)
    session, caller = submit(driver, request)
    chain.run(driver, steps=4)
    driver.disconnect()
    driver.connect(chain, ChainShape(SHAPE.capacity_tokens, max_rows=5), Resumption(has_new_first=True))
    known = (*request.prompt, *caller.tokens)
    parts = [work for work, _ in chain.replayed]
    assert [(p.session, p.start, p.ids, p.logit_rows) for p in parts] == [
        (session, 0, known[:5], 0),
        (session, 5, known[5:8], 0),
    ]
    assert [opening and opening.session for _, opening in chain.replayed] == [session, None]
    chain.run(driver)
    assert caller.tokens == continuation(request.prompt, 8)


def test_a_stage_that_could_not_be_told_is_given_everything() -> None:
    driver, lost = connected()
    request = ask(5, 8)
    session, caller = submit(driver, request)
    lost.run(driver, steps=4)
    driver.disconnect()
    chain = FakeChain()
    driver.connect(chain, SHAPE, Resumption(has_new_first=True))
    assert chain.frames[0].work[0].start > 0, "the frame that will leave a gap is under way"
    driver.replay_failed([session, session + 1])
    chain.run(driver)
    assert caller.error is None
    assert caller.tokens == continuation(request.prompt, 8)


def test_memory_that_grows_or_shrinks_disturbs_no_session_that_is_computed_again() -> None:
    driver, lost = connected()
    requests = [ask(40, 8), ask(50, 8, first=3), ask(60, 8, first=9)]
    callers = [submit(driver, request)[1] for request in requests]
    lost.run(driver, steps=5)
    assert all(caller.tokens for caller in callers)
    chain = FakeChain(capacity_pages=10)
    driver.connect(chain, ChainShape(10 * PAGE_TOKENS, max_rows=8, can_share=False))
    for pages in (2, 1, 20, 2):
        chain.run(driver, steps=2)
        chain.compute()
        driver.resize(pages * PAGE_TOKENS)
        assert driver.load().used_tokens <= pages * PAGE_TOKENS or driver.load().running == 1
    chain.run(driver)
    assert [c.tokens for c in callers] == [continuation(request.prompt, 8) for request in requests]


def test_sessions_that_ended_without_a_chain_are_freed_on_the_next() -> None:
    driver, chain = connected()
    session, _ = submit(driver, ask())
    chain.run(driver, steps=2)
    driver.disconnect()
    driver.cancel(session)
    assert chain.closed == []
    driver.connect(chain, SHAPE, Resumption())
    chain.run(driver)
    assert chain.closed == [session]
    assert chain.held_sessions == set()


# Scores of a prompt


def scores(prompt: Sequence[int]) -> tuple[TokenChoice, ...]:
    return (TokenChoice(prompt[0]), *(TokenChoice(token, -float(token)) for token in prompt[1:]))


def test_the_first_delta_carries_the_prompts_scores() -> None:
    driver, chain = connected(ChainShape(SHAPE.capacity_tokens, max_logit_rows=4))
    requests = [ask(11, prompt_logprobs=1), ask(1, prompt_logprobs=0), ask(7)]
    callers = [submit(driver, request)[1] for request in requests]
    chain.run(driver)
    assert callers[0].deltas[0].prompt == scores(requests[0].prompt)
    assert callers[1].deltas[0].prompt == scores(requests[1].prompt)
    assert callers[2].deltas[0].prompt == ()
    assert all(delta.prompt == () for caller in callers for delta in caller.deltas[1:])


def test_scores_are_in_the_prompts_order_whatever_order_they_come_in() -> None:
    driver, chain = connected(PIPELINE)
    request = ask(30, prompt_logprobs=0)
    _, caller = submit(driver, request)
    while not caller.is_over:
        while chain.compute():
            pass
        chain.deliver(driver, index=-1)
    assert caller.deltas[0].prompt == scores(request.prompt)
    assert caller.tokens == continuation(request.prompt, 6)


@pytest.mark.parametrize("steps", range(6))
def test_scores_survive_a_lost_chain(steps: int) -> None:
    driver, lost = connected(PIPELINE)
    request = ask(21, 3, prompt_logprobs=0)
    session, caller = submit(driver, request)
    for _ in range(steps):
        while lost.compute():
            pass
        lost.deliver(driver, index=-1)
    driver.disconnect()
    driver.connect(chain := FakeChain(), PIPELINE)
    chain.run(driver)
    assert caller.deltas[0].prompt == scores(request.prompt)
    assert caller.tokens == continuation(request.prompt, 3)
    asked_again = sum(part.logit_rows for part in chain.sent_to(session) if part.targets)
    assert asked_again <= 20 - 8 * (steps > 4), "what is known is not scored again"


# Steps that fail


def test_a_failed_step_hits_only_its_sessions() -> None:
    driver, chain = connected(PIPELINE)
    for first in range(3):
        submit(driver, ask(16, 4, first=first))  # one frame each
    assert [len(frame.work) for frame in chain.frames] == [1, 1, 1]
    driver.fail_all(LinkError("start again with callers"))
    chain.run(driver)
    callers = {}
    for first in range(3):
        session, caller = submit(driver, ask(16, 4, first=first))
        callers[session] = caller
    failing = chain.frames[-2]
    (part,) = failing.work
    while chain.compute():
        pass
    index = [sequence for sequence, _ in chain.computed].index(failing.sequence)
    chain.computed[index] = (failing.sequence, BackendError("a kernel broke"))
    chain.run(driver)
    for session, caller in callers.items():
        if session == part.session:
            assert isinstance(caller.error, BackendError)
            assert chain.closed.count(session) == 1
        else:
            assert caller.finish == "length"


def test_frames_behind_a_failed_one_do_not_drag_others_down() -> None:
    """The failed session's next rows leave a gap: who shares a frame with them is computed again."""
    driver, chain = make_driver(), FakeChain()
    _, doomed = submit(driver, ask(40, 4))
    _, caller = submit(driver, ask(5, 4, first=9))
    driver.connect(chain, PIPELINE)
    assert [len(frame.work) for frame in chain.frames] == [1, 2, 1]
    chain.skip(chain.frames[0])
    chain.computed.append((chain.frames[0].sequence, BackendError("a kernel broke")))
    chain.run(driver)
    assert isinstance(doomed.error, BackendError)
    assert caller.tokens == continuation(ask(5, first=9).prompt, 4)


def test_the_youngest_makes_room_and_goes_on_later() -> None:
    driver, chain = connected(ChainShape(2 * PAGE_TOKENS, can_share=False), pages=2)
    requests = [ask(60, 12), ask(60, 12, first=7)]
    (_, old), (young, caller) = [submit(driver, request) for request in requests]
    chain.run(driver)
    assert chain.closed.count(young) == 2, "once to make room, once at its end"
    assert old.tokens == continuation(requests[0].prompt, 12)
    assert caller.tokens == continuation(requests[1].prompt, 12)
    restart = next(i for i, part in enumerate(chain.sent_to(young)) if i and part.start == 0)
    known = (*requests[1].prompt, *caller.tokens)
    assert chain.sent_to(young)[restart].ids == known[: len(chain.sent_to(young)[restart].ids)]


def test_one_session_that_outgrows_the_memory_is_told() -> None:
    driver, chain = connected(ChainShape(PAGE_TOKENS), pages=1)
    _, caller = submit(driver, ask(60, 12))
    _, other = submit(driver, ask(5, 4))
    chain.run(driver)
    assert isinstance(caller.error, CapacityError)
    assert len(caller.tokens) == 5
    assert other.tokens == continuation(ask(5, 4).prompt, 4)


def test_memory_that_was_freed_on_the_way_is_tried_before_anyone_is_told() -> None:
    driver, chain = connected(ChainShape(2 * PAGE_TOKENS), pages=2)
    _, caller = submit(driver, ask(60, 12))
    leaves, _ = submit(driver, ask(30, 50))
    while len(caller.tokens) < 5:
        chain.compute()
        if chain.computed:
            chain.deliver(driver)
    while chain.compute():  # the row that needs a third page is refused …
        pass
    assert isinstance(chain.computed[0][1], CapacityError)
    driver.cancel(leaves)  # … and room is made before the driver hears of it
    chain.run(driver)
    assert caller.tokens == continuation(ask(60).prompt, 12)


def test_a_session_whose_opening_was_refused_is_opened_again() -> None:
    """Its first frame failed for want of memory and someone else made room."""
    driver, chain = connected()
    first, _ = submit(driver, ask(5))
    second, caller = submit(driver, ask(6))
    third, _ = submit(driver, ask(7))
    while len(chain.frames) < 2:
        chain.compute()
        chain.deliver(driver)
    frame = chain.frames[1]
    assert [opening.session for opening in frame.openings] == [second, third]
    chain.skip(frame)
    driver.step_failed(frame.sequence, CapacityError("KV memory is full"))
    assert chain.closed == [third]
    opened = [opening.session for sent in chain.frames[2:] for opening in sent.openings]
    assert second in opened
    chain.run(driver)
    assert caller.tokens == continuation(ask(6).prompt, 6)
    assert first == 1


def test_rows_behind_a_refused_frame_are_sent_again() -> None:
    """With several frames in flight, the ones behind a refused one leave a gap; nobody is at fault."""
    driver, chain = connected(PIPELINE)
    _, other = submit(driver, ask(4, 8, first=3))
    chain.compute()
    chain.deliver(driver)
    _, caller = submit(driver, ask(40, 4))
    refused = next(frame for frame in chain.frames if any(p.session == 2 for p in frame.work))
    chain.skip(refused)
    chain.computed.append((refused.sequence, CapacityError("KV memory is full")))
    chain.run(driver)
    assert caller.tokens == continuation(ask(40).prompt, 4)
    assert other.tokens == continuation(ask(4, first=3).prompt, 8)


# Everything at once


def _any_outcome(chain: FakeChain, chance: random.Random) -> int:
    """Results come in any order; failures, which are all one stage's, in theirs."""
    index = chance.randrange(len(chain.computed))
    failures = [i for i, (_, outcome) in enumerate(chain.computed) if isinstance(outcome, ShardComputeError)]
    return failures[0] if index in failures else index


def _storm(driver: Driver, chance: random.Random, pages: int, is_over: Callable[[], bool]) -> None:
    """Losses, late results and full memory in random order until everyone has an answer."""
    shape = ChainShape(pages * PAGE_TOKENS, stages=chance.choice([1, 2, 4]), max_rows=chance.choice([5, 64]))
    driver.connect(chain := FakeChain(pages), shape)
    for _ in range(20_000):
        if is_over():
            return
        event = chance.random()
        if event < 0.5:
            chain.compute()
        elif event < 0.99 and chain.computed:
            chain.deliver(driver, _any_outcome(chain, chance))
        elif event >= 0.995:
            driver.disconnect()
            driver.connect(chain := FakeChain(pages), shape)
    pytest.fail("the answers do not come to an end")


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_what_they_would_have_been_in_peace(seed: int) -> None:
    chance = random.Random(seed)
    driver = make_driver(max_sessions=chance.choice([2, 4, 16]))
    requests = [
        ask(
            chance.choice([1, 9, 62, 120]),
            chance.randint(1, 20),
            first=i,
            prompt_logprobs=chance.choice([None, 0]),
        )
        for i in range(7)
    ]
    callers = [submit(driver, request)[1] for request in requests]
    _storm(driver, chance, pages=5, is_over=lambda: all(caller.is_over for caller in callers))
    for caller, request in zip(callers, requests, strict=True):
        assert caller.error is None
        assert caller.tokens == continuation(request.prompt, request.max_tokens)
        assert caller.deltas[0].prompt == (
            scores(request.prompt) if request.prompt_logprobs is not None else ()
        )
    assert driver.load().running == driver.load().waiting == 0
