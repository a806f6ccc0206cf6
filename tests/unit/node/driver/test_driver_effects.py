"""What a driver decides under its lock it does outside of it: in order, and nobody waits for another's caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

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


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def repairing(quiet_s: float) -> tuple[Driver, Later, Caller, Clock]:
    """A driver whose chain was lost while it answered."""
    limits = DriverLimits(vocab_size=30, context_length=1000, speculation=Speculation("off"))
    later, clock = Later(), Clock()
    driver = Driver(cast(Tokenizer, Letters()), limits, call_later=later, quiet_s=quiet_s, clock=clock)
    driver.connect(FakeChain(), SHAPE)
    _, caller = submit(driver, ask(5, 3))
    driver.disconnect()
    return driver, later, caller, clock


def test_whoever_waits_for_weights_waits_while_they_arrive() -> None:
    driver, later, caller, clock = repairing(100.0)
    for percent in range(10, 100, 10):
        clock.now_s += 90.0
        driver.progressed((2, percent / 100), f"lap has {percent} % of layers 4 to 7")
        _, look = later.calls[-1]
        clock.now_s += 10.0
        look()
        assert later.calls[-1][0] == pytest.approx(90.0), "what is left of the time after the last progress"
        clock.now_s -= 10.0
    assert not caller.is_over
    clock.now_s += 100.0
    later.calls[-1][1]()
    assert isinstance(caller.error, CapacityError)
    assert "lap has 90 % of layers 4 to 7" in str(caller.error)
    assert "no further for 1.7 min" in str(caller.error)


def test_what_goes_back_and_forth_is_no_progress() -> None:
    driver, later, caller, clock = repairing(100.0)
    for fraction in (0.5, 0.4, 0.5, 0.3):
        driver.progressed((2, fraction), "lap has some of it")
        clock.now_s += 30.0
    later.calls[-1][1]()
    assert isinstance(caller.error, CapacityError)


def test_another_plan_is_progress() -> None:
    driver, later, caller, clock = repairing(100.0)
    driver.progressed((2, 0.5), "lap has half of it")
    clock.now_s += 90.0
    driver.progressed((3, 0.0), "desk has nothing of it yet")
    clock.now_s += 90.0
    later.calls[-1][1]()
    assert not caller.is_over


def test_one_that_asks_after_all_were_told_is_told_as_well() -> None:
    driver, later, caller, clock = repairing(100.0)
    clock.now_s += 100.0
    later.calls[-1][1]()
    assert "no machine loads what is missing" in str(caller.error)
    _, another = submit(driver, ask(5, 3))
    clock.now_s += 100.0
    later.calls[-1][1]()
    assert isinstance(another.error, CapacityError)


def test_progress_ends_the_wait_for_machines() -> None:
    """One that was missing is back, and loads: that it is missing is no reason to give up any more."""
    driver, later, caller, _ = repairing(100.0)
    driver.fail_later(LOST, 7.0)
    number = len(later.calls) - 1
    driver.progressed((2, 0.0), "lap has nothing of it yet")
    assert number in later.stopped
    later.calls[number][1]()
    assert not caller.is_over
    driver.fail_later(LOST, 7.0)
    driver.progressed((2, 0.0), "lap has nothing of it yet")
    later.calls[-1][1]()
    assert caller.error is LOST, "it was told before"
