"""Drafts make answers come faster or not at all faster, and never different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest, Speculation
from shardcompute.decoding.ngram import NgramDrafter
from shardcompute.decoding.router import PipeLoad
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape, DriverLimits
from shardcompute.node.driver.scheduler import PipeContext
from shardcompute.node.driver.sessions.session import Session
from shardcompute.node.driver.speculator import RoutedSpeculator
from shardcompute.node.rpc.session_ids import Resumption
from support.models.drafters import Oracle
from support.swarm.fake_chain import PIPELINE, Caller, FakeChain, Letters, ask, continuation, submit

LONGEST = 60


def answer(prompt: tuple[int, ...]) -> list[int]:
    return continuation(prompt, LONGEST)


def never(position: int) -> bool:
    return False


def drafting(
    is_wrong: Callable[[int], bool] = never, shape: ChainShape = PIPELINE, pages: int = 100
) -> tuple[Driver, FakeChain, Oracle]:
    oracle = Oracle(answer, is_wrong)
    limits = DriverLimits(vocab_size=30, context_length=1000)
    driver, chain = Driver(cast(Tokenizer, Letters()), limits, drafters=[oracle]), FakeChain(pages)
    driver.connect(chain, shape)
    return driver, chain, oracle


def drafted(
    tokens: int | None, frames: int | None, length: int = 5, max_tokens: int = 20
) -> GenerationRequest:
    return ask(length, max_tokens, speculation=Speculation("model", tokens, frames))


def expected(request: GenerationRequest) -> list[int]:
    return continuation(request.prompt, request.max_tokens)


def frames_after_prompt(chain: FakeChain) -> int:
    return len(chain.frames) - 1


def test_right_drafts_save_traversals() -> None:
    driver, chain, _ = drafting()
    request = drafted(4, 1, max_tokens=21)
    _, caller = submit(driver, request)
    chain.run(driver)
    assert caller.tokens == expected(request)
    # One token with the prompt, then five with each frame.
    assert frames_after_prompt(chain) == 4
    timings = caller.deltas[-1].timings
    assert timings is not None
    assert (timings.traversals, timings.drafted_tokens, timings.accepted_tokens) == (4, 16, 16)
    assert timings.drafted_by_position == timings.accepted_by_position == (4, 4, 4, 4)
    assert timings.generated_tokens == 21


def test_wrong_drafts_cost_rows_and_nothing_else() -> None:
    driver, chain, _ = drafting(lambda position: True)
    request = drafted(3, 1, max_tokens=10)
    _, caller = submit(driver, request)
    chain.run(driver)
    assert caller.tokens == expected(request)
    assert frames_after_prompt(chain) == 9
    timings = caller.deltas[-1].timings
    assert timings is not None
    assert timings.accepted_tokens == 0
    assert timings.drafted_by_position == (8, 7, 6)
    assert timings.accepted_by_position == (0, 0, 0)


def test_several_frames_of_one_session_are_on_their_way_at_once() -> None:
    driver, chain, _ = drafting()
    _, caller = submit(driver, drafted(2, 3, max_tokens=30))
    chain.run(driver, steps=1)
    assert [[len(part.ids) for part in frame.work] for frame in chain.frames[1:]] == [[3], [2], [2]]
    chain.run(driver)
    assert caller.tokens == continuation(ask(5).prompt, 30)


@pytest.mark.parametrize(("rows", "logit_rows"), [(16, 8), (64, 64), (4, 3)])
def test_drafts_of_many_sessions_keep_within_what_the_stages_take(rows: int, logit_rows: int) -> None:
    shape = replace(PIPELINE, max_rows=rows, max_logit_rows=logit_rows)
    driver, chain, _ = drafting(shape=shape)
    callers = [submit(driver, drafted(16, 2, length=3 + turn, max_tokens=20))[1] for turn in range(6)]
    chain.run(driver)
    assert [caller.tokens for caller in callers] == [
        continuation(ask(3 + turn).prompt, 20) for turn in range(6)
    ]
    sizes = [
        (sum(len(part.ids) for part in frame.work), sum(part.logit_rows for part in frame.work))
        for frame in chain.frames
    ]
    assert all(count <= rows and logits <= logit_rows for count, logits in sizes), sizes
    assert max(logits for _, logits in sizes) > 1


def test_what_was_sent_behind_a_wrong_draft_does_not_count() -> None:
    driver, chain, _ = drafting(lambda position: position == 7)
    request = drafted(2, 3, max_tokens=12)
    _, caller = submit(driver, request)
    chain.run(driver)
    assert caller.tokens == expected(request)


@given(
    wrong=st.sets(st.integers(5, 60)),
    tokens=st.integers(1, 16),
    frames=st.integers(1, 8),
    max_tokens=st.integers(1, 40),
    sessions=st.integers(1, 4),
    choices=st.lists(st.integers(0, 1 << 16), max_size=60),
)
def test_any_mistakes_in_any_order_of_results(
    wrong: set[int], tokens: int, frames: int, max_tokens: int, sessions: int, choices: list[int]
) -> None:
    driver, chain, _ = drafting(wrong.__contains__)
    requests = [
        ask(5, max_tokens, first=i, speculation=Speculation("model", tokens, frames)) for i in range(sessions)
    ]
    callers = [submit(driver, request)[1] for request in requests]
    for choice in choices:
        if choice % 2 or not chain.computed:
            chain.compute()
        elif chain.computed:
            chain.deliver(driver, choice // 2 % len(chain.computed))
    chain.run(driver)
    assert [caller.tokens for caller in callers] == [expected(request) for request in requests]
    assert chain.held_sessions == set()


@given(wrong=st.sets(st.integers(5, 60)), steps=st.integers(0, 12), knows=st.booleans())
def test_a_chain_that_breaks_in_the_middle(wrong: set[int], steps: int, knows: bool) -> None:
    driver, chain, _ = drafting(wrong.__contains__)
    requests = [drafted(3, 4, length) for length in (5, 9)]
    callers = [submit(driver, request)[1] for request in requests]
    chain.run(driver, steps)
    driver.disconnect()
    # What the stages were computing is lost, or kept as far as they came.
    while chain.compute():
        pass
    chain.computed.clear()
    if knows:
        driver.connect(chain, PIPELINE, Resumption(None))
    else:
        chain = FakeChain()
        driver.connect(chain, PIPELINE)
    chain.run(driver)
    assert [caller.tokens for caller in callers] == [expected(request) for request in requests]


@given(wrong=st.sets(st.integers(5, 60)), pages=st.integers(2, 4))
def test_little_memory(wrong: set[int], pages: int) -> None:
    shape = replace(PIPELINE, capacity_tokens=pages * PAGE_TOKENS, max_logit_rows=16)
    driver, chain, _ = drafting(wrong.__contains__, shape, pages)
    requests = [drafted(8, 3, 50 + i, 25) for i in range(3)]
    callers = [submit(driver, request)[1] for request in requests]
    chain.run(driver)
    assert [caller.tokens for caller in callers] == [expected(request) for request in requests]


def test_an_answer_that_stops_in_the_middle_of_accepted_drafts() -> None:
    driver, chain, _ = drafting()
    request = drafted(8, 1, max_tokens=30)
    whole = expected(request)
    stopping = GenerationRequest(
        request.prompt, 30, stop_ids=frozenset({whole[4]}), speculation=request.speculation
    )
    _, caller = submit(driver, stopping)
    chain.run(driver)
    first = whole.index(whole[4])
    assert caller.tokens == whole[: first + 1]
    assert caller.finish == "stop"
    timings = caller.deltas[-1].timings
    assert timings is not None
    assert timings.generated_tokens == first + 1


def test_a_slow_drafter_holds_up_its_own_session_only() -> None:
    oracle = Oracle(answer, is_slow=True)
    limits = DriverLimits(vocab_size=30, context_length=1000)
    driver, chain = Driver(cast(Tokenizer, Letters()), limits, drafters=[oracle]), FakeChain()
    driver.connect(chain, PIPELINE)
    request = drafted(4, 1, max_tokens=21)
    _, caller = submit(driver, request)
    _, other = submit(driver, ask(7, 8, speculation=Speculation("off")))
    while not caller.is_over:
        chain.run(driver)
    assert caller.tokens == expected(request)
    assert other.tokens == continuation(ask(7).prompt, 8)
    driver.close()


def test_a_slow_drafter_that_fails_leaves_plain_decoding() -> None:
    class Broken(Oracle):
        def propose(self, *_: object) -> object:  # type: ignore[override]
            raise RuntimeError("no")

    limits = DriverLimits(vocab_size=30, context_length=1000)
    drafter = Broken(answer, is_slow=True)
    driver, chain = Driver(cast(Tokenizer, Letters()), limits, drafters=[drafter]), FakeChain()
    driver.connect(chain, PIPELINE)
    request = drafted(4, 1, max_tokens=5)
    _, caller = submit(driver, request)
    while not caller.is_over:
        chain.run(driver)
    assert caller.tokens == expected(request)
    driver.close()


@pytest.mark.parametrize(
    "wish",
    [Speculation("head"), Speculation("model"), Speculation("ngram", 17), Speculation("ngram", 1, 9)],
)
def test_what_cannot_be_done_is_refused(wish: Speculation) -> None:
    driver = Driver(cast(Tokenizer, Letters()), DriverLimits(vocab_size=30, context_length=1000))
    with pytest.raises(UsageError):
        driver.submit(ask(5, 6, speculation=wish), Caller())


def test_a_session_that_ends_is_forgotten_by_its_drafter() -> None:
    driver, chain, oracle = drafting()
    generation, caller = submit(driver, drafted(2, 2))
    chain.run(driver)
    assert caller.is_over
    assert oracle.forgotten == [generation]


def repeating(oracle: Oracle) -> tuple[RoutedSpeculator, Session]:
    """A session whose text repeats itself, on a ring that is known to be slow."""
    speculator = RoutedSpeculator([NgramDrafter(), oracle], Speculation(), lambda session, take: None)
    for rows in (1, 4, 16) * 20:
        speculator.router.traversed(rows, 0.1, [0.002, 0.002])
    prompt = tuple([0, 1, 2] * 20)
    return speculator, Session(1, GenerationRequest(prompt, 50), [*prompt, 0], sent=len(prompt))


RING = PipeContext(PipeLoad(1, 0, 2), depth=2, free_tokens=1000)


def test_a_free_draft_that_is_sure_goes_before_a_drafter_that_is_better_in_the_mean() -> None:
    speculator, session = repeating(Oracle(lambda prompt: [0, 1, 2] * 20, is_slow=True))
    for _ in range(50):
        speculator.router.verified(1, "ngram", 3, 8, 8)
        speculator.router.verified(1, "model", 1, 4, 3)
    speculator.extend(session, RING)
    assert speculator.stats_of(1).plan.drafter == "ngram"
    assert session.assumed[:2] == [1, 2]
    speculator.close()


def test_a_draft_that_was_looked_for_and_then_taken_is_one_round() -> None:
    speculator, session = repeating(Oracle(lambda prompt: [0, 1, 2] * 20, is_slow=True))
    for _ in range(50):
        speculator.router.verified(1, "ngram", 3, 8, 8)
    speculator.router.choose(1, Speculation("off"), (), RING.load)
    # A chain that goes on by itself is held back for the draft, which is then sent.
    assert not speculator.lets_continue(session, RING)
    assert "share_ngram" not in speculator.router.snapshot()
    speculator.extend(session, RING)
    assert session.assumed
    told = speculator.router.snapshot()
    assert (told["share_ngram"], told["share_plain"]) == (0.5, 0.5)
    speculator.close()


def test_a_slow_drafter_is_asked_where_the_draft_at_hand_is_poor() -> None:
    speculator, session = repeating(Oracle(lambda prompt: [0, 1, 2] * 20, is_slow=True))
    for _ in range(100):
        speculator.router.verified(1, "ngram", 3, 8, 0)
        speculator.router.verified(1, "model", 1, 4, 4)
    speculator.extend(session, RING)
    assert speculator.stats_of(1).plan.drafter == "model"
    assert session.is_drafting
    speculator.close()


def test_drafts_are_not_worth_making_room_for() -> None:
    speculator, session = repeating(Oracle(lambda prompt: [0, 1, 2] * 20))
    session.known.extend([1, 2])  # with the next one they fill its page
    session.sent += 2
    speculator.extend(session, replace(RING, free_tokens=PAGE_TOKENS - 1))
    assert session.assumed == []
    speculator.extend(session, replace(RING, free_tokens=PAGE_TOKENS))
    assert session.assumed
    speculator.close()
