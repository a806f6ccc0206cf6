"""Effects are done in order, by one thread at a time, and nobody waits for another's."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest

from shardcompute.core.effects import EffectQueue, start_timer

PATIENCE_S = 10.0


def test_nothing_is_done_before_it_is_run() -> None:
    queue, done = EffectQueue(), list[int]()
    for number in range(3):
        queue.put(partial(done.append, number))
    assert done == []
    queue.run()
    assert done == [0, 1, 2]


def test_what_an_effect_puts_comes_after_it() -> None:
    queue, done = EffectQueue(), list[str]()

    def first() -> None:
        queue.put(partial(done.append, "third"))
        queue.run()
        done.append("first")

    queue.put(first)
    queue.put(partial(done.append, "second"))
    queue.run()
    assert done == ["first", "second", "third"]


def test_one_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    queue, done = EffectQueue(), list[int]()
    queue.put(lambda: [][0])
    queue.put(partial(done.append, 1))
    with caplog.at_level(logging.ERROR):
        queue.run()
    assert done == [1]
    assert "could not be done" in caplog.text


def test_whoever_comes_while_another_is_at_it_leaves_it_to_that_one() -> None:
    queue, done = EffectQueue(), list[tuple[int, str]]()
    begun, may_go_on = threading.Event(), threading.Event()

    def note(number: int) -> None:
        done.append((number, threading.current_thread().name))

    def slow() -> None:
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        note(1)

    queue.put(slow)
    thread = threading.Thread(target=queue.run, name="busy")
    thread.start()
    assert begun.wait(PATIENCE_S)
    queue.put(partial(note, 2))
    queue.run()
    assert done == [], "it did not wait"
    may_go_on.set()
    thread.join()
    assert done == [(1, "busy"), (2, "busy")]


def test_flushing_waits_for_what_is_being_done() -> None:
    queue, done = EffectQueue(), list[int]()
    begun, may_go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        done.append(1)

    queue.put(slow)
    thread = threading.Thread(target=queue.run)
    thread.start()
    assert begun.wait(PATIENCE_S)
    threading.Timer(0.02, may_go_on.set).start()
    queue.flush()
    assert done == [1]
    thread.join()


def test_many_threads_keep_the_order_of_decisions() -> None:
    queue, done, decided, lock = EffectQueue(), list[int](), list[int](), threading.Lock()

    def decide() -> None:
        for _ in range(200):
            with lock:
                decided.append(len(decided))
                queue.put(partial(done.append, decided[-1]))
            queue.run()

    threads = [threading.Thread(target=decide) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.flush()
    assert done == decided == list(range(800))


def test_a_timer_can_be_called_off() -> None:
    came = threading.Event()
    start_timer(0.0, came.set)
    assert came.wait(PATIENCE_S)
    never: list[int] = []
    start_timer(3600.0, partial(never.append, 1))()
    assert never == []
