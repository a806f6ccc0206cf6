"""Drafts make answers come faster or not at all faster, and never different."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest, Speculation
from shardcompute.core.steps import Draft, Opening
from shardcompute.decoding.ngram import NgramDrafter
from shardcompute.decoding.routing.router import PipeLoad
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape, DriverLimits
from shardcompute.node.driver.scheduler import PipeContext
from shardcompute.node.driver.sessions.session import Session
from shardcompute.node.driver.speculator import RoutedSpeculator, TakeDraft
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


@dataclass
class PatientOracle(Oracle):
    """A slow one that can go on while frames travel; each time it has begun it may be held up until it is unwanted."""

    is_slow: bool = True
    is_held: bool = False
    limits: list[int] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def propose_while(
        self,
        tokens: Sequence[int],
        known: int,
        limit: int,
        opening: Opening,
        is_wanted: Callable[[], bool],
    ) -> Draft | None:
        self.limits.append(limit)
        self.begun.release()
        for _ in range(60_000 if self.is_held else 0):
            if not is_wanted():
                break
            threading.Event().wait(0.001)
        return self.propose(opening.session, tokens[:known], tokens[known:], limit, opening)


Drafts = queue.Queue[TakeDraft]


def far(oracle: Oracle, frames: int = 1) -> tuple[RoutedSpeculator, Session, Drafts]:
    """A session on a far ring, whose drafter has nearly always been right; and what its thread hands over."""
    drafts: Drafts = queue.Queue()
    speculator = RoutedSpeculator([oracle], Speculation("model", 3, frames), lambda _, take: drafts.put(take))
    for rows in (1, 4, 16) * 20:
        speculator.router.traversed(rows, 0.2, [0.002, 0.002])
    for _ in range(200):
        speculator.router.verified(1, "model", 0, 3, 3)
    prompt = tuple(range(5))
    return speculator, Session(1, GenerationRequest(prompt, 50), [*prompt, answer(prompt)[0]], sent=5), drafts


def hold(session: Session, count: int) -> None:
    """The frame with all that is assumed is back: all of it was right, and one more is known."""
    story = [*session.request.prompt, *answer(session.request.prompt)]
    session.known = story[: len(session.known) + count]
    session.assumed, session.sent = [], len(session.known) - 1


def test_a_slow_drafter_goes_on_while_its_frame_travels() -> None:
    oracle = PatientOracle(answer)
    speculator, session, drafts = far(oracle)
    speculator.extend(session, RING)
    assert session.is_drafting
    drafts.get(timeout=60)(session, RING)
    assert not session.is_drafting
    count = len(session.assumed)
    assert count == 3
    # Nobody waits for what it drafts now: the token that will be picked behind these, and three more.
    drafts.get(timeout=60)(session, RING)
    assert (oracle.limits, len(session.assumed)) == ([3, 4], 3)
    hold(session, 4)
    speculator.extend(session, RING)
    assert not session.is_drafting, "it is there already"
    assert session.assumed == answer(session.request.prompt)[5:8]
    speculator.close()


def test_what_was_drafted_ahead_of_a_mistake_is_not_sent() -> None:
    oracle = PatientOracle(answer)
    speculator, session, drafts = far(oracle)
    speculator.extend(session, RING)
    drafts.get(timeout=60)(session, RING)
    session.sent = session.length
    drafts.get(timeout=60)(session, RING)
    wrong = session.assumed[0] + 1
    session.known.append(wrong)
    session.roll_back(len(session.known) - 1, 1)
    speculator.committed(session, was_assumed=True, is_right=False)
    speculator.extend(session, RING)
    assert session.is_drafting, "it has to be asked again"
    assert session.assumed == []
    speculator.close()


def test_a_mistake_stops_what_follows_it_and_nobody_waits_for_it() -> None:
    oracle = PatientOracle(answer)
    speculator, session, drafts = far(oracle, frames=3)
    speculator.extend(session, RING)
    take = drafts.get(timeout=60)
    oracle.is_held = True
    take(session, RING)
    session.sent = session.length
    session.flights.add(1)
    # What is drafted ahead is what the second frame waits for.
    speculator.extend(session, RING)
    assert session.is_drafting
    assert oracle.begun.acquire(timeout=60)
    assert oracle.begun.acquire(timeout=60)
    assert oracle.limits == [3, 4]
    session.known.append(session.assumed[0] + 1)
    session.roll_back(len(session.known) - 1, 1)
    speculator.committed(session, was_assumed=True, is_right=False)
    assert not session.is_drafting
    drafts.get(timeout=60)(session, RING)
    assert session.assumed == []
    speculator.close()


def test_a_session_that_waits_is_not_held_up_by_what_is_drafted_ahead_for_another() -> None:
    oracle = PatientOracle(answer)
    speculator, session, drafts = far(oracle)
    speculator.extend(session, RING)
    assert oracle.begun.acquire(timeout=60)
    take = drafts.get(timeout=60)
    oracle.is_held = True
    take(session, RING)
    assert oracle.begun.acquire(timeout=60), "it goes on for the first one"
    other = Session(2, session.request, [*session.request.prompt, 7], sent=5)
    speculator.extend(other, RING)
    oracle.is_held = False
    drafts.get(timeout=60)(session, RING)
    drafts.get(timeout=60)(other, RING)
    assert not other.is_drafting
    assert other.assumed
    speculator.close()


def test_what_is_waited_for_goes_on_from_what_has_come_meanwhile() -> None:
    oracle = PatientOracle(answer)
    speculator, session, drafts = far(oracle)
    speculator.extend(session, RING)
    take = drafts.get(timeout=60)
    hold(session, 1)
    take(session, RING)
    assert session.assumed == answer(session.request.prompt)[2:4], "its first token is known by now"
    speculator.close()


@given(
    wrong=st.sets(st.integers(5, 40)),
    tokens=st.integers(1, 6),
    frames=st.integers(1, 5),
    sessions=st.integers(1, 3),
)
def test_drafting_ahead_changes_no_token(wrong: set[int], tokens: int, frames: int, sessions: int) -> None:
    oracle = PatientOracle(answer, wrong.__contains__)
    limits = DriverLimits(vocab_size=30, context_length=1000)
    driver, chain = Driver(cast(Tokenizer, Letters()), limits, drafters=[oracle]), FakeChain()
    driver.connect(chain, PIPELINE)
    wish = Speculation("model", tokens, frames)
    requests = [ask(5, 20, first=i, speculation=wish) for i in range(sessions)]
    callers = [submit(driver, request)[1] for request in requests]
    while not all(caller.is_over for caller in callers):
        chain.run(driver)
    driver.close()
    assert [caller.tokens for caller in callers] == [expected(request) for request in requests]
