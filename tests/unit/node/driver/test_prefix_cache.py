"""A prompt that begins like an earlier one is not computed twice, and its answer is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcompute.core.generation import GenerationRequest
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import DriverLimits
from shardcompute.node.rpc.session_ids import Resumption
from support.swarm.fake_chain import PIPELINE, Caller, FakeChain, ask, connected, continuation, submit

SHARING = replace(PIPELINE, can_share=True)


def run(driver: Driver, chain: FakeChain, request: GenerationRequest) -> Caller:
    _, caller = submit(driver, request)
    chain.run(driver)
    assert caller.tokens == continuation(request.prompt, request.max_tokens)
    return caller


def cached(caller: Caller) -> int:
    timings = caller.deltas[-1].timings
    assert timings is not None
    return timings.cached_tokens


def test_a_conversation_goes_on_where_it_stopped() -> None:
    driver, chain = connected(SHARING)
    first = ask(50, 10)
    run(driver, chain, first)
    turn = replace(first, prompt=(*first.prompt, *continuation(first.prompt, 10), 3, 4, 5))
    sent = len(chain.frames)
    caller = run(driver, chain, turn)
    assert cached(caller) == 59, "the last token of the first answer was never computed"
    assert sum(frame.rows for frame in chain.frames[sent:]) == 4 + 9
    assert len(chain.held_sessions) == 1, "the earlier session was taken over"


def test_another_question_after_the_same_beginning() -> None:
    driver, chain = connected(SHARING)
    beginning = ask(60).prompt
    run(driver, chain, GenerationRequest((*beginning, 1, 2), 5))
    caller = run(driver, chain, GenerationRequest((*beginning, 7, 7), 5))
    assert cached(caller) == 60
    assert len(chain.held_sessions) == 2
    assert cached(run(driver, chain, GenerationRequest((*beginning, 1, 2), 5))) >= 60


def test_a_session_that_is_still_answering_shares_too() -> None:
    driver, chain = connected(SHARING)
    _, first = submit(driver, ask(60, 50))
    chain.run(driver, steps=10)
    assert not first.is_over
    assert cached(run(driver, chain, ask(60, 5))) == 59
    assert first.tokens == continuation(ask(60).prompt, 50)


@pytest.mark.parametrize("field", ["caller", "cache_salt"])
def test_scopes_share_nothing(field: str) -> None:
    driver, chain = connected(SHARING)
    run(driver, chain, ask(60, 5, **{field: "one"}))
    assert cached(run(driver, chain, ask(60, 5, **{field: "other"}))) == 0
    assert cached(run(driver, chain, ask(60, 5, **{field: "one"}))) > 0


def test_a_caller_is_no_salt_and_a_request_id_neither() -> None:
    driver, chain = connected(SHARING)
    run(driver, chain, ask(60, 5, caller="one", request_id="a"))
    assert cached(run(driver, chain, ask(60, 5, cache_salt="one"))) == 0
    assert cached(run(driver, chain, ask(60, 5, caller="one", request_id="b"))) > 0


def test_scored_prompts_are_computed() -> None:
    driver, chain = connected(SHARING)
    run(driver, chain, ask(60, 5))
    assert cached(run(driver, chain, ask(60, 5, prompt_logprobs=0))) == 0


def test_memory_goes_to_those_who_need_it() -> None:
    driver, chain = connected(replace(SHARING, capacity_tokens=4 * 64), pages=4)
    for first in range(8):
        run(driver, chain, ask(60, 10, first=first))
        assert len(chain.held_sessions) <= 4


def test_a_chain_that_was_repaired_knows_nothing_of_ended_sessions() -> None:
    driver, chain = connected(SHARING)
    run(driver, chain, ask(60, 5))
    driver.disconnect()
    other = FakeChain()
    driver.connect(other, SHARING)
    assert cached(run(driver, other, ask(60, 5))) == 0


def test_a_new_first_stage_is_told_the_whole_session() -> None:
    driver, chain = connected(SHARING)
    run(driver, chain, ask(60, 5))
    _, caller = submit(driver, ask(60, 30))
    chain.run(driver, steps=4)
    assert caller.tokens
    driver.disconnect()
    driver.connect(chain, SHARING, Resumption(has_new_first=True))
    work, opening = chain.replayed[0]
    assert work.start == 0
    assert opening is not None
    assert opening.prefix is None
    chain.run(driver)
    assert caller.tokens == continuation(ask(60).prompt, 30)


def test_a_stage_that_cannot_share_after_all() -> None:
    driver, chain = connected(SHARING)
    run(driver, chain, ask(60, 5))
    chain.forgets_sources = True
    assert cached(run(driver, chain, ask(60, 5))) == 0
    driver.drop_prefixes()
    chain.run(driver)
    assert chain.held_sessions == set()


@pytest.mark.parametrize("is_sharing", [True, False])
def test_what_is_kept_can_be_dropped(is_sharing: bool) -> None:
    driver, chain = connected(replace(PIPELINE, can_share=is_sharing))
    run(driver, chain, ask(60, 5))
    assert len(chain.held_sessions) == int(is_sharing)
    driver.drop_prefixes()
    chain.run(driver)
    assert chain.held_sessions == set()


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 100), st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=12
    ),
    pages=st.integers(3, 8),
    steps=st.integers(0, 12),
    breaks=st.booleans(),
)
def test_any_mixture(requests: list[tuple[int, int, int]], pages: int, steps: int, breaks: bool) -> None:
    limits = DriverLimits(vocab_size=30, context_length=120)
    driver, chain = connected(
        replace(SHARING, capacity_tokens=pages * 64), pages=pages, context_length=limits.context_length
    )
    asked = [ask(length, tokens, first=first) for length, first, tokens in requests]
    callers = []
    for request in asked:
        callers.append(submit(driver, request)[1])
        chain.run(driver, steps)
    if breaks:
        driver.disconnect()
        chain = FakeChain(pages)
        driver.connect(chain, replace(SHARING, capacity_tokens=pages * 64))
    chain.run(driver)
    for request, caller in zip(asked, callers, strict=True):
        assert caller.tokens == continuation(
            request.prompt, min(request.max_tokens, 120 - len(request.prompt))
        )
