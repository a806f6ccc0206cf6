"""What a driver decides under its lock it does outside of it: in order, and nobody waits for another's caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from shardcompute.core.effects import Effect
from shardcompute.core.errors import CapacityError, ShardComputeError
from shardcompute.core.generation import Delta, Speculation
from shardcompute.core.steps import Frame
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import DriverLimits
from support.swarm.fake_chain import (
    PIPELINE,
    SHAPE,
    Caller,
    FakeChain,
    Letters,
    ask,
    connected,
    continuation,
    make_driver,
    submit,
)

PATIENCE_S = 10.0
LOST = CapacityError("a machine is missing")


class Gate:
    """Holds whoever passes until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_slow_caller_delays_neither_new_requests_nor_cancelling() -> None:
    driver, chain = connected(PIPELINE)
    gate, slow = Gate(), Caller()

    def emit(said: Delta | ShardComputeError) -> None:
        gate.wait()
        slow(said)

    driver.submit(ask(5, 3), emit)
    leaving, left = submit(driver, ask(6, 3))
    chain.compute()
    thread = in_thread(lambda: chain.deliver(driver))
    assert gate.reached.wait(PATIENCE_S)
    coming, _ = submit(driver, ask(7, 3))
    assert chain.sent_to(coming), "its prompt is on its way although somebody is slow to listen"
    driver.cancel(leaving)
    assert leaving in chain.closed
    gate.opened.set()
    thread.join()
    chain.run(driver)
    assert slow.tokens == continuation(ask(5).prompt, 3)
    assert not left.is_over


def test_a_caller_that_fails_is_alone_with_it() -> None:
    driver, chain = connected()

    def fail(said: Delta | ShardComputeError) -> None:
        raise RuntimeError("no")

    driver.submit(ask(5, 3), fail)
    _, other = submit(driver, ask(6, 3))
    chain.run(driver)
    assert other.tokens == continuation(ask(6).prompt, 3)


def test_a_caller_may_cancel_others() -> None:
    driver, chain = connected()
    first, other, numbers = Caller(), Caller(), list[int]()

    def emit(said: Delta | ShardComputeError) -> None:
        first(said)
        driver.cancel(numbers[1])

    numbers += [driver.submit(ask(5, 3), emit), driver.submit(ask(6, 3), other)]
    chain.run(driver)
    assert first.tokens == continuation(ask(5).prompt, 3)
    assert other.tokens == []
    assert driver.load().running == 0
    assert chain.held_sessions == set()


def test_what_waits_to_be_emitted_is_dropped_with_its_generation() -> None:
    driver, chain = connected()
    gate, other = Gate(), Caller()
    driver.submit(ask(5, 3), lambda said: gate.wait())
    number = driver.submit(ask(6, 3), other)
    chain.compute()
    thread = in_thread(lambda: chain.deliver(driver))
    assert gate.reached.wait(PATIENCE_S)
    chain.compute()
    chain.deliver(driver)
    driver.cancel(number)
    gate.opened.set()
    thread.join()
    assert other.tokens == [], "its first token was picked, and not told yet"


def test_results_from_two_threads_keep_deltas_and_frames_in_order() -> None:
    driver, chain = connected(PIPELINE)
    requests = [ask(5, 40, first=number) for number in range(6)]
    callers = [submit(driver, request)[1] for request in requests]
    taking = threading.Lock()

    def serve() -> None:
        while not all(caller.is_over for caller in callers):
            with taking:
                chain.compute()
                outcome = chain.computed.pop(0) if chain.computed else None
            if outcome is not None:
                sequence, picked = outcome
                assert not isinstance(picked, ShardComputeError)
                driver.take_results(sequence, picked)

    threads = [in_thread(serve) for _ in range(2)]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [caller.tokens for caller in callers] == [continuation(r.prompt, 40) for r in requests]
    assert [frame.sequence for frame in chain.frames] == list(range(1, len(chain.frames) + 1))


@dataclass
class SlowChain(FakeChain):
    """Takes its time over each frame."""

    gate: Gate = field(default_factory=Gate)

    def send(self, frame: Frame) -> None:
        self.gate.wait()
        super().send(frame)


def test_no_frame_is_sent_once_the_driver_is_closed() -> None:
    driver, slow, told = make_driver(), SlowChain(), threading.Event()
    driver.connect(slow, PIPELINE)
    sending = in_thread(lambda: driver.submit(ask(5, 3), Caller()))
    assert slow.gate.reached.wait(PATIENCE_S)
    driver.submit(ask(6, 3), lambda said: told.set())
    closing = in_thread(driver.close)
    assert told.wait(PATIENCE_S), "callers hear of the end while a frame is still being sent"
    assert closing.is_alive(), "it waits for that frame"
    slow.gate.opened.set()
    sending.join()
    closing.join()
    assert [len(frame.work[0].ids) for frame in slow.frames] == [5], "the second one came too late"


@dataclass
class Later:
    """A `CallLater` without time: what is due is done by hand."""

    calls: list[tuple[float, Effect]] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)

    def __call__(self, delay_s: float, effect: Effect) -> Callable[[], None]:
        self.calls.append((delay_s, effect))
        number = len(self.calls) - 1
        return lambda: self.stopped.append(number)


def waiting() -> tuple[Driver, Later, Caller]:
    limits = DriverLimits(vocab_size=30, context_length=1000, speculation=Speculation("off"))
    later = Later()
    driver = Driver(cast(Tokenizer, Letters()), limits, call_later=later)
    _, caller = submit(driver, ask(5, 3))
    return driver, later, caller


def test_patience_ends_and_generations_with_it() -> None:
    driver, later, caller = waiting()
    driver.fail_later(LOST, 7.0)
    driver.fail_later(CapacityError("another"), 9.0)
    assert [delay_s for delay_s, _ in later.calls] == [7.0], "one wait at a time"
    assert not caller.is_over
    later.calls[0][1]()
    assert caller.error is LOST


def test_a_chain_that_comes_in_time_ends_the_wait() -> None:
    driver, later, caller = waiting()
    driver.fail_later(LOST, 7.0)
    chain = FakeChain()
    driver.connect(chain, SHAPE)
    assert later.stopped == [0]
    later.calls[0][1]()
    assert caller.error is None, "a timer that comes late means nothing"
    driver.fail_later(LOST, 7.0)
    assert [delay_s for delay_s, _ in later.calls].count(7.0) == 1, "there is a chain"
    driver.disconnect()
    driver.fail_later(LOST, 7.0)
    assert [delay_s for delay_s, _ in later.calls].count(7.0) == 2
    driver.close()
    assert sorted(later.stopped) == [0, 1, 2, 3], "and nobody looks for frames, or waits for a repair"


def test_no_patience_at_all() -> None:
    driver, later, caller = waiting()
    driver.fail_later(LOST, 0.0)
    assert caller.error is LOST
    assert later.calls == []
