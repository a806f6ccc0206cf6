"""A driver that misses a frame has it looked for, and takes rows that a stage lacks for what they are: lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from shardcompute.core.effects import Effect
from shardcompute.core.errors import CapacityError, RowGapError, UsageError
from shardcompute.core.generation import Speculation
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import DriverLimits
from shardcompute.node.rpc.session_ids import Resumption
from shardcompute.node.rpc.step_times import Patience
from support.swarm.fake_chain import PIPELINE, SHAPE, FakeChain, Letters, ask, connected, continuation, submit


@dataclass
class Time:
    """A clock and its timers; `pass_s` lets time go by and does what is due."""

    now_s: float = 1000.0
    timers: list[tuple[float, Effect]] = field(default_factory=list)
    started: int = 0

    def __call__(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, effect: Effect) -> Callable[[], None]:
        timer = (self.now_s + delay_s, effect)
        self.timers.append(timer)
        self.started += 1
        return lambda: self.timers.remove(timer) if timer in self.timers else None

    def pass_s(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while due := [timer for timer in self.timers if timer[0] <= until_s]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now_s = first[0]
            first[1]()
        self.now_s = until_s


def timed_driver() -> tuple[Driver, FakeChain, Time]:
    time = Time()
    limits = DriverLimits(vocab_size=30, context_length=1000, speculation=Speculation("off"))
    driver = Driver(
        cast(Tokenizer, Letters()),
        limits,
        call_later=time.call_later,
        patience=Patience(floor_s=2.0, factor=8.0, cold_s=10.0),
        clock=time,
    )
    driver.connect(chain := FakeChain(), SHAPE)
    return driver, chain, time


def test_a_frame_that_does_not_come_back_is_looked_for_again_and_again() -> None:
    driver, chain, time = timed_driver()
    _, caller = submit(driver, ask(5, 8))
    time.pass_s(9.9)
    assert chain.missed == [], "the first may take long"
    chain.run(driver, steps=3)
    sequence = chain.frames[-1].sequence
    time.pass_s(200.0)
    missed = [each for each in chain.missed if each[0] == sequence]
    waits = [waited_s for _, waited_s, _ in missed]
    assert waits[0] < 200.0
    assert waits == sorted(waits)
    assert len(waits) > 3
    chain.run(driver)
    assert caller.tokens == continuation(ask(5).prompt, 8)
    asked = len(chain.missed)
    time.pass_s(1000.0)
    assert len(chain.missed) == asked, "nothing is under way"
    assert time.timers == []


def test_quick_steps_are_missed_soon_and_need_few_timers() -> None:
    driver, chain, time = timed_driver()
    submit(driver, ask(5, 500))
    for _ in range(300):
        time.pass_s(0.05)
        chain.run(driver, steps=1)
    assert time.started < 20
    assert chain.missed == []
    time.pass_s(3.0)
    [(_, waited_s, allowed_s)] = chain.missed
    assert allowed_s == 2.0
    assert 2.0 <= waited_s <= 3.0


def test_what_a_lost_chain_owes_is_missed_no_more() -> None:
    driver, chain, time = timed_driver()
    submit(driver, ask(5, 8))
    driver.disconnect()
    time.pass_s(1000.0)
    assert chain.missed == []
    driver.connect(chain, SHAPE, Resumption())
    time.pass_s(11.0)
    assert len(chain.missed) == 1, "of the new one it is"
    driver.close()
    time.pass_s(1000.0)
    assert len(chain.missed) == 1


@pytest.mark.parametrize("lost", range(3))
def test_a_lost_part_of_a_prompt_is_sent_again(lost: int) -> None:
    driver, chain = connected(PIPELINE)
    _, other = submit(driver, ask(4, 8, first=3))
    chain.run(driver, steps=1)
    session, caller = submit(driver, ask(60, 4))
    parts = 0
    while not caller.is_over:
        frames = [frame for frame in chain.waiting if any(part.session == session for part in frame.work)]
        if parts <= lost and frames:
            if parts == lost:
                chain.skip(frames[0])
            parts += 1
        chain.run(driver, steps=1)
    assert caller.error is None
    assert caller.tokens == continuation(ask(60).prompt, 4)
    chain.run(driver)
    assert other.tokens == continuation(ask(4, first=3).prompt, 8)


def test_a_session_that_the_chain_has_forgotten_is_computed_again() -> None:
    driver, chain = connected()
    session, caller = submit(driver, ask(5, 8))
    chain.run(driver, steps=3)
    chain.forget(session)
    chain.run(driver)
    assert caller.error is None
    assert caller.tokens == continuation(ask(5).prompt, 8)


def test_a_chain_that_forgets_always_fails_the_session_at_last() -> None:
    driver, chain = connected()
    _, caller = submit(driver, ask(5, 8))
    chain.run(driver, steps=3)
    for _ in range(10):
        if caller.is_over:
            break
        frame = chain.frames[-1]
        chain.skip(frame)
        driver.step_failed(frame.sequence, RowGapError("rows are missing"))
    assert isinstance(caller.error, RowGapError)


def test_nobody_waits_for_ever_for_a_chain_that_is_being_repaired() -> None:
    driver, chain, time = timed_driver()
    _, caller = submit(driver, ask(5, 8))
    driver.disconnect()
    time.pass_s(1000.0)
    assert not caller.is_over
    driver.connect(chain, SHAPE, Resumption({}))
    time.pass_s(1000.0)
    assert not caller.is_over, "it was there in between"
    driver.disconnect()
    time.pass_s(1801.0)
    assert isinstance(caller.error, CapacityError)
    assert "status" in caller.error.hint
    driver.close()
    assert time.timers == []


class HungDrafter:
    """Does not come back before it is let go."""

    name = "model"
    is_slow = True

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    def propose(self, *args: object) -> None:
        self.asked.set()
        assert self.let_go.wait(60)

    def forget(self, session: int) -> None:
        """It holds nothing."""

    def close(self) -> None:
        """It holds nothing."""


def test_a_drafter_that_hangs_is_done_without() -> None:
    time, drafter = Time(), HungDrafter()
    limits = DriverLimits(vocab_size=30, context_length=1000, speculation=Speculation("model", tokens=2))
    driver = Driver(
        cast(Tokenizer, Letters()), limits, drafters=[drafter], call_later=time.call_later, clock=time
    )
    driver.connect(chain := FakeChain(), SHAPE)
    try:
        _, caller = submit(driver, ask(5, 8))
        chain.run(driver)
        assert drafter.asked.wait(20)
        assert not caller.is_over
        time.pass_s(11.0)
        chain.run(driver)
        assert caller.tokens == continuation(ask(5).prompt, 8)
        with pytest.raises(UsageError, match="no drafter"):
            submit(driver, ask(5, 8))
    finally:
        drafter.let_go.set()
        driver.close()
