"""Sessions that their chain continues by itself: one frame ahead of the driver, and the same answers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import BackendError, CapacityError
from shardcompute.core.generation import Sampling, Speculation
from shardcompute.core.steps import PICKED
from shardcompute.node.driver.driver import Driver
from support.swarm.fake_chain import (
    CONTINUING,
    SHAPE,
    Caller,
    FakeChain,
    ask,
    connected,
    continuation,
    make_driver,
    submit,
)


def continued_rows(chain: FakeChain, session: int) -> list[int]:
    return [part.start for part in chain.sent_to(session) if part.is_continuation]


def test_the_next_row_is_sent_before_the_token_is_known() -> None:
    driver, chain = connected(CONTINUING)
    session, caller = submit(driver, ask(5, 4))
    assert [part.ids for part in chain.sent_to(session)] == [(0, 1, 2, 3, 4), (PICKED,)]
    chain.run(driver)
    assert caller.tokens == continuation(range(5), 4)
    # The last token that is asked for is picked, and its row not computed.
    assert continued_rows(chain, session) == [5, 6, 7]


def test_at_most_one_frame_is_ahead() -> None:
    driver, chain = connected(CONTINUING)
    submit(driver, ask(5, 50))
    for _ in range(20):
        assert len(chain.waiting) <= 2
        chain.compute()
        chain.deliver(driver)
    assert len(chain.waiting) == 2


@pytest.mark.parametrize("shape", [SHAPE, replace(CONTINUING, stages=2)])
def test_other_chains_are_sent_known_tokens_alone(shape: object) -> None:
    driver, chain = connected(shape)  # type: ignore[arg-type]
    session, caller = submit(driver, ask(5, 6))
    chain.run(driver)
    assert continued_rows(chain, session) == []
    assert caller.tokens == continuation(range(5), 6)


def test_what_a_session_brings_after_its_end_is_dropped_and_freed() -> None:
    driver, chain = connected(CONTINUING)
    answer = continuation(range(5), 20)
    stop = answer[3]
    session, caller = submit(driver, ask(5, 20, stop_ids=frozenset({stop})))
    other, other_caller = submit(driver, ask(7, 20, first=3))
    chain.run(driver)
    assert caller.finish == "stop"
    assert caller.tokens == answer[: answer.index(stop) + 1]
    assert len(continued_rows(chain, session)) == len(caller.tokens)
    assert other_caller.tokens == continuation([(3 + i) % 26 for i in range(7)], 20)
    assert chain.held_sessions == set()
    assert {session, other} <= set(chain.closed)


def test_a_cancelled_session_is_freed_behind_the_row_that_is_ahead() -> None:
    driver, chain = connected(CONTINUING)
    session, caller = submit(driver, ask(5, 20))
    chain.compute()
    chain.deliver(driver)
    driver.cancel(session)
    chain.run(driver)
    assert chain.held_sessions == set()
    assert not caller.is_over


def test_hidden_states_are_waited_for() -> None:
    driver, chain = connected(CONTINUING)
    session, _ = submit(driver, ask(5, 6, sampling=Sampling(wants_hidden=True)))
    chain.run(driver)
    assert continued_rows(chain, session) == []


def test_scored_prompts_continue_after_their_first_token() -> None:
    driver, chain = connected(CONTINUING)
    session, caller = submit(driver, ask(5, 6, prompt_logprobs=1))
    chain.run(driver)
    assert caller.tokens == continuation(range(5), 6)
    assert continued_rows(chain, session)[0] == 6


def test_a_drafter_that_was_asked_for_is_waited_for() -> None:
    driver, chain = connected(CONTINUING)
    session, caller = submit(driver, ask(5, 12, speculation=Speculation("ngram", tokens=2)))
    chain.run(driver)
    assert continued_rows(chain, session) == []
    assert caller.tokens == continuation(range(5), 12)


def test_memory_that_runs_out_under_rows_ahead_costs_no_token() -> None:
    driver, chain = connected(replace(CONTINUING, capacity_tokens=4 * PAGE_TOKENS), pages=4)
    asked = [ask(40, 100, first=first) for first in range(4)]
    callers = [submit(driver, request)[1] for request in asked]
    chain.run(driver)
    assert [caller.tokens for caller in callers] == [continuation(each.prompt, 100) for each in asked]


def test_the_row_ahead_of_a_step_that_failed_is_sent_again() -> None:
    driver, chain = connected(CONTINUING)
    asked = [ask(5, 10), ask(6, 10)]
    callers = [submit(driver, request)[1] for request in asked]
    for _ in range(4):
        chain.compute()
        chain.deliver(driver)
    first, second = chain.waiting
    assert all(part.is_continuation for part in second.work)
    chain.skip(first)
    driver.step_failed(first.sequence, CapacityError("no room just now"))
    chain.run(driver)
    assert [caller.tokens for caller in callers] == [continuation(each.prompt, 10) for each in asked]


def test_an_error_ends_the_session_and_leaves_the_others() -> None:
    driver, chain = connected(CONTINUING)
    session, caller = submit(driver, ask(5, 10))
    chain.compute()
    chain.deliver(driver)
    first = chain.waiting[0]
    chain.skip(first)
    driver.step_failed(first.sequence, BackendError("broken"))
    _, other = submit(driver, ask(6, 10))
    chain.run(driver)
    assert isinstance(caller.error, BackendError)
    assert other.tokens == continuation(range(6), 10)
    assert session in chain.closed


@pytest.mark.parametrize("seed", range(30))
def test_whatever_befalls_the_chain_the_tokens_are_the_same(seed: int) -> None:
    chance = random.Random(seed)
    driver, chain = make_driver(max_sessions=6), FakeChain(20)
    shape = replace(CONTINUING, capacity_tokens=20 * PAGE_TOKENS, can_share=bool(seed % 2))
    driver.connect(chain, shape)
    wanted: list[tuple[Caller, list[int]]] = []
    for _ in range(400):
        chain = disturb(chance, driver, chain, shape, wanted)
    for _ in range(3):
        chain.run(driver)
    for caller, expected in wanted:
        assert caller.error is None
        assert caller.tokens == expected[: len(caller.tokens)]
        assert caller.finish is not None


def disturb(
    chance: random.Random,
    driver: Driver,
    chain: FakeChain,
    shape: object,
    wanted: list[tuple[Caller, list[int]]],
) -> FakeChain:
    """One thing happens."""
    what = chance.random()
    if what < 0.08:
        length, tokens = chance.randrange(1, 70), chance.randrange(1, 40)
        answer = continuation([i % 26 for i in range(length)], tokens)
        stops = frozenset({answer[chance.randrange(len(answer))]}) if chance.random() < 0.5 else frozenset()
        request = ask(length, tokens, stop_ids=stops)
        wanted.append((submit(driver, request)[1], answer))
    elif what < 0.1:
        driver.disconnect()
        chain = FakeChain(20)
        driver.connect(chain, shape)  # type: ignore[arg-type]
    elif what < 0.12 and chain.waiting:
        # A frame is lost; what follows it leaves a gap, of which the driver is told.
        chain.skip(chain.waiting[0])
        chain.compute()
    elif what < 0.6:
        chain.compute()
    elif chain.computed:
        chain.deliver(driver)
    return chain
