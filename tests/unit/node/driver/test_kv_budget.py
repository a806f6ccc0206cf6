"""The KV budget alone: who is admitted, what is kept, and who makes room."""

from __future__ import annotations

from typing import Any

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.driver.sessions.kv_budget import KvBudget
from shardcompute.node.driver.sessions.session import Session

PAGE = PAGE_TOKENS


def session(number: int, length: int = PAGE - 1, *, first: int = 0, **options: Any) -> Session:
    """A session that takes a page, unless it is longer."""
    prompt = tuple(range(first, first + length))
    return Session(number, GenerationRequest(prompt, 10, **options), list(prompt))


def computed(number: int, length: int = PAGE - 1, **options: Any) -> Session:
    done = session(number, length, **options)
    done.sent, done.is_opened = length, True
    return done


def sharing(pages: int) -> KvBudget:
    return KvBudget(pages * PAGE, can_share=True)


def test_sessions_are_admitted_while_there_is_room() -> None:
    budget = KvBudget(2 * PAGE)
    assert [budget.admit(session(number)) for number in (1, 2, 3)] == [True, True, False]
    assert list(budget.running) == [1, 2]
    assert (budget.used_tokens, budget.free_tokens) == (2 * PAGE, 0)
    assert budget.release(budget.running[1])
    assert budget.admit(session(3))


def test_one_alone_is_always_admitted() -> None:
    budget = KvBudget(PAGE)
    assert budget.admit(session(1, 5 * PAGE))
    assert budget.free_tokens < 0


def test_a_session_that_never_ran_gives_nothing_back() -> None:
    budget = KvBudget(PAGE)
    assert not budget.release(session(1))


def test_what_is_kept_takes_room_and_is_shared() -> None:
    budget = sharing(4)
    ended = computed(1)
    assert budget.keep(ended)
    assert budget.free_tokens == 3 * PAGE
    following = session(2, 2 * PAGE)
    assert budget.admit(following)
    assert following.prefix is not None
    assert (following.prefix.source, following.prefix.is_moved) == (1, True)
    assert budget.free_tokens == PAGE, "what was taken over is counted once"


def test_nothing_is_kept_where_the_chain_cannot_share_or_is_away() -> None:
    assert not KvBudget(4 * PAGE).keep(computed(1))
    budget = sharing(4)
    budget.disconnect()
    assert not budget.keep(computed(1))
    assert budget.connect(4 * PAGE, can_share=True) == []
    assert budget.keep(computed(1))
    assert budget.connect(2 * PAGE, can_share=True) == [1]
    assert budget.free_tokens == 2 * PAGE


def test_scored_rows_are_computed() -> None:
    budget = sharing(4)
    budget.keep(computed(1))
    scored = session(2, prompt_logprobs=1)
    assert budget.admit(scored)
    assert scored.prefix is None


def test_what_is_kept_makes_room_the_oldest_first() -> None:
    budget = sharing(4)
    for number in (1, 2, 3):
        assert budget.keep(computed(number, first=100 * number))
    assert budget.make_room(None) == []
    assert budget.make_room(session(4, 2 * PAGE)) == [1, 2]
    assert budget.admit(session(4, 2 * PAGE))
    assert budget.make_room(None) == [3], "those who run grow by a page each"
    assert budget.make_room(session(5, 9 * PAGE)) == [], "no more than there is"


def test_all_that_is_kept_is_given_up() -> None:
    budget = sharing(4)
    budget.keep(computed(1))
    budget.keep(computed(2, first=100))
    assert budget.evict() == 1
    assert budget.evict_all() == [2]
    assert budget.evict() is None
    assert budget.free_tokens == 4 * PAGE


def test_the_youngest_is_to_make_room_and_the_last_one_never() -> None:
    budget = KvBudget(9 * PAGE)
    old, young = session(1), session(2)
    budget.admit(old)
    assert budget.choose_victim() is None
    budget.admit(young)
    assert budget.choose_victim() is young
