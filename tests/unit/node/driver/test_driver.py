"""The driver over a chain that exists in the test alone."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import (
    PromptTooLongError,
    QueueFullError,
    ShardComputeError,
    UsageError,
)
from shardcompute.core.generation import Delta, GenerationRequest, Sampling, TokenChoice
from shardcompute.core.steps import Picked
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape, DriverLoad
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

# A plain run


def test_an_answer_comes_token_by_token_and_ends_once() -> None:
    driver, chain = connected()
    session, caller = submit(driver, ask())
    chain.run(driver)
    assert caller.tokens == continuation(ask().prompt, 6)
    assert caller.text == "".join(chr(97 + token) for token in caller.tokens)
    assert [delta.finish for delta in caller.deltas] == [None] * 5 + ["length"]
    timings = caller.deltas[-1].timings
    assert timings is not None
    assert (timings.prompt_tokens, timings.generated_tokens) == (5, 6)
    assert chain.closed == [session]
    assert chain.held_sessions == set()
    assert driver.load() == DriverLoad(0, 0, 0, SHAPE.capacity_tokens)


def test_requests_wait_for_the_first_chain() -> None:
    driver = make_driver()
    _, caller = submit(driver, ask())
    assert driver.load().waiting == 1
    chain = FakeChain()
    driver.connect(chain, SHAPE)
    chain.run(driver)
    assert caller.tokens == continuation(ask().prompt, 6)


def test_no_frame_is_larger_than_the_chain_takes() -> None:
    driver, chain = connected(ChainShape(SHAPE.capacity_tokens, max_rows=7, max_logit_rows=2))
    callers = [submit(driver, ask(20, first=i))[1] for i in range(4)]
    chain.run(driver)
    assert chain.most_rows == 7
    assert max(sum(part.logit_rows for part in frame.work) for frame in chain.frames) == 2
    assert [c.tokens for c in callers] == [continuation(ask(20, first=i).prompt, 6) for i in range(4)]


def test_results_may_come_out_of_order() -> None:
    driver, chain = connected(PIPELINE)
    requests = [ask(3 + i, first=i) for i in range(4)]
    callers = [submit(driver, request)[1] for request in requests]
    while not all(caller.is_over for caller in callers):
        while chain.compute():
            pass
        chain.deliver(driver, index=-1)
    assert [c.tokens for c in callers] == [continuation(request.prompt, 6) for request in requests]


def test_sessions_share_the_chain_fairly() -> None:
    driver, chain = connected(PIPELINE)
    callers = [submit(driver, ask(9, 50, first=i))[1] for i in range(11)]
    chain.run(driver, steps=44)
    early = [len(caller.tokens) for caller in callers]
    chain.run(driver, steps=44)
    gained = [len(caller.tokens) - before for caller, before in zip(callers, early, strict=True)]
    assert min(early) > 5
    assert max(gained) - min(gained) <= 1, "each frame takes the next few, in turn"


def test_more_sessions_than_slots_are_served_one_after_the_other() -> None:
    driver, chain = connected(max_sessions=2)
    callers = [submit(driver, ask(first=i))[1] for i in range(5)]
    chain.run(driver, steps=1)
    assert (driver.load().running, driver.load().waiting) == (2, 3)
    chain.run(driver)
    assert all(caller.finish == "length" for caller in callers)


# How answers end


def letters(text: str) -> list[int]:
    return [ord(c) - 97 for c in text]


def scripted(driver: Driver, chain: FakeChain, text: str) -> None:
    """The chain answers these letters whatever was asked; it stops when the driver does."""
    for token in letters(text):
        if not chain.frames:
            return
        frame = chain.frames.pop(0)
        (part,) = frame.work
        driver.take_results(
            frame.sequence, [Picked(part.session, part.start + len(part.ids) - 1, TokenChoice(token))]
        )


@pytest.mark.parametrize(
    ("include_stop", "text"), [(False, "xxab"), (True, "xxabstop")], ids=["cut", "included"]
)
def test_a_stop_string_ends_the_answer(include_stop: bool, text: str) -> None:
    driver, chain = connected()
    _, caller = submit(driver, ask(max_tokens=50, stop=("stop", "never"), include_stop=include_stop))
    scripted(driver, chain, "xxabstopyyy")
    assert (caller.finish, caller.text, len(caller.tokens)) == ("stop", text, 8)
    assert caller.deltas[4].text == "", "what may become a stop string is held back"


def test_what_was_held_back_is_given_when_the_answer_ends_otherwise() -> None:
    driver, chain = connected()
    _, caller = submit(driver, ask(max_tokens=4, stop=("stop",)))
    scripted(driver, chain, "xsto")
    assert (caller.finish, caller.text) == ("length", "xsto")


def test_a_stop_id_ends_the_answer_silently() -> None:
    driver, chain = connected()
    _, caller = submit(driver, ask(max_tokens=50, stop_ids=frozenset({25})))
    scripted(driver, chain, "abzcd")
    assert (caller.finish, caller.text, caller.tokens) == ("stop", "ab", letters("abz"))


def test_the_end_of_the_context_ends_the_answer() -> None:
    driver, chain = connected(context_length=8)
    _, caller = submit(driver, ask(5, 50, stop=("xyz",)))
    scripted(driver, chain, "axyz")
    assert (caller.finish, caller.tokens) == ("length", letters("axy"))
    assert caller.text == "axy", "the part of a stop string that was held back is not lost"
    assert driver.load().running == 0


def test_a_cancelled_generation_is_freed_and_silent() -> None:
    driver, chain = connected()
    stays, other = submit(driver, ask(first=3))
    leaves, caller = submit(driver, ask())
    chain.compute()
    chain.deliver(driver)
    seen = len(caller.deltas)
    driver.cancel(leaves)
    driver.cancel(leaves)
    driver.cancel(12345)
    chain.run(driver)
    assert len(caller.deltas) == seen
    assert chain.closed.count(leaves) == 1
    assert chain.held_sessions == set()
    assert other.tokens == continuation(ask(first=3).prompt, 6)
    assert stays != leaves


def test_a_waiting_generation_can_be_cancelled() -> None:
    driver = make_driver()
    generation, caller = submit(driver, ask())
    driver.cancel(generation)
    chain = FakeChain()
    driver.connect(chain, SHAPE)
    assert chain.frames == []
    assert caller.deltas == []


def test_emitting_may_cancel_another_generation_of_the_same_frame() -> None:
    driver, chain = connected()
    second: list[int] = []
    heard: list[Delta] = []

    def first_caller(delta: Delta | ShardComputeError) -> None:
        assert isinstance(delta, Delta)
        heard.append(delta)
        driver.cancel(second[0])

    driver.connect(FakeChain(), ChainShape(0))  # both are in before the first frame
    driver.disconnect()
    driver.submit(ask(), first_caller)
    generation, caller = submit(driver, ask(first=2))
    second.append(generation)
    driver.connect(chain, SHAPE)
    assert len(chain.frames[0].work) == 2
    chain.run(driver)
    assert len(heard) == 6
    assert caller.deltas == []


# What is refused


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask(0), UsageError, "empty"),
        (ask(max_tokens=0), UsageError, "max_tokens"),
        (GenerationRequest((3, 30), 5), UsageError, "outside the vocabulary"),
        (GenerationRequest((3, -1), 5), UsageError, "outside the vocabulary"),
        (ask(1000), PromptTooLongError, "1000 tokens"),
        (ask(sampling=Sampling(temperature=-1.0)), UsageError, "temperature"),
    ],
)
def test_refuses_what_cannot_work(
    request_: GenerationRequest, error: type[ShardComputeError], message: str
) -> None:
    driver, chain = connected()
    with pytest.raises(error, match=message):
        submit(driver, request_)
    assert chain.frames == []
    assert driver.load() == DriverLoad(0, 0, 0, SHAPE.capacity_tokens)


def test_a_full_queue_refuses_more() -> None:
    driver, chain = connected(max_sessions=1, max_waiting=2)
    callers = [submit(driver, ask())[1] for _ in range(3)]
    with pytest.raises(QueueFullError, match="2 requests"):
        submit(driver, ask())
    chain.run(driver)
    assert all(caller.finish == "length" for caller in callers)
    submit(driver, ask())
