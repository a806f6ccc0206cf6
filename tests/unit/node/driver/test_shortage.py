"""A stage whose device has no memory left: answers wait for it, or for others, and go on as they would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from shardcompute.core.effects import Effect
from shardcompute.core.errors import DeviceMemoryError
from shardcompute.core.generation import Speculation
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import DriverLimits
from support.swarm.fake_chain import PIPELINE, SHAPE, FakeChain, Letters, ask, continuation, submit

FULL = DeviceMemoryError("memory ran out while a step was computed: CUDA out of memory", hint="offer less")
PAUSE_S = 0.5


class Pauses:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, Effect]] = []

    def call_later(self, delay_s: float, effect: Effect) -> Callable[[], None]:
        entry = (delay_s, effect)
        self.pending.append(entry)
        return lambda: entry in self.pending and self.pending.remove(entry)

    def pass_by(self, delay_s: float) -> None:
        due = [entry for entry in self.pending if entry[0] == delay_s]
        assert due, f"nobody waits for {delay_s} s: {self.pending}"
        for entry in due:
            self.pending.remove(entry)
            entry[1]()


def open_driver(time: Pauses) -> Driver:
    limits = DriverLimits(vocab_size=30, context_length=1000, speculation=Speculation("off"))
    return Driver(cast(Tokenizer, Letters()), limits, call_later=time.call_later)


def fail_newest(driver: Driver, chain: FakeChain) -> None:
    """The frame that was sent last finds a full device."""
    frame = chain.waiting[-1]
    chain.skip(frame)
    driver.step_failed(frame.sequence, FULL)


def test_an_answer_waits_a_moment_and_goes_on_with_the_same_tokens() -> None:
    time, chain = Pauses(), FakeChain()
    driver = open_driver(time)
    driver.connect(chain, SHAPE)
    _, caller = submit(driver, ask())
    chain.run(driver, steps=2)
    fail_newest(driver, chain)
    assert chain.waiting == [], "nothing is sent to a full device"
    time.pass_by(PAUSE_S)
    chain.run(driver)
    assert caller.error is None
    assert caller.tokens == continuation(ask().prompt, 6)


def test_what_is_under_way_beside_it_goes_on_too() -> None:
    time, chain = Pauses(), FakeChain()
    driver = open_driver(time)
    driver.connect(chain, PIPELINE)
    callers = [submit(driver, ask(4 + i, first=i))[1] for i in range(3)]
    fail_newest(driver, chain)
    chain.run(driver)
    time.pass_by(PAUSE_S)
    chain.run(driver)
    assert [caller.tokens for caller in callers] == [
        continuation(ask(4 + i, first=i).prompt, 6) for i in range(3)
    ]


def test_another_machine_that_takes_over_ends_the_wait() -> None:
    time, chain = Pauses(), FakeChain()
    driver = open_driver(time)
    driver.connect(chain, SHAPE)
    _, caller = submit(driver, ask())
    chain.run(driver, steps=2)
    fail_newest(driver, chain)
    driver.disconnect()
    other = FakeChain()
    driver.connect(other, SHAPE)
    other.run(driver)
    assert caller.tokens == continuation(ask().prompt, 6)
    assert not [delay_s for delay_s, _ in time.pending if delay_s == PAUSE_S], "the pause is called off"


def test_a_device_that_stays_full_is_told_after_longer_and_longer_waits() -> None:
    time, chain = Pauses(), FakeChain()
    driver = open_driver(time)
    driver.connect(chain, SHAPE)
    _, caller = submit(driver, ask())
    for times in range(4):
        fail_newest(driver, chain)
        assert caller.error is None
        time.pass_by(PAUSE_S * 2**times)
    fail_newest(driver, chain)
    assert caller.error is FULL
    _, other = submit(driver, ask(7))
    chain.run(driver)
    assert other.tokens == continuation(ask(7).prompt, 6), "others are served"


def test_a_token_in_between_begins_the_count_anew() -> None:
    time, chain = Pauses(), FakeChain()
    driver = open_driver(time)
    driver.connect(chain, SHAPE)
    _, caller = submit(driver, ask(5, 12))
    for _ in range(10):
        fail_newest(driver, chain)
        time.pass_by(PAUSE_S)
        chain.run(driver, steps=1)
    chain.run(driver)
    assert caller.tokens == continuation(ask().prompt, 12)
