from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.wire import Goodbye, Link, LinkPump, Message, Ping
from shardcompute.wire.control import TensorBytes

Connect = Callable[..., Any]


class Recorder:
    """Callbacks that remember."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Message] = queue.Queue()
        self.closed: queue.Queue[LinkError] = queue.Queue()

    def take(self, message: Message, body: memoryview) -> None:
        self.messages.put(message)

    def pump(self, link: Link, **options: Any) -> LinkPump:
        return LinkPump(link, self.take, self.closed.put, **options)


def test_messages_go_through_in_order(connect: Connect) -> None:
    pair, near, far = connect(), Recorder(), Recorder()
    with near.pump(pair.near) as sender, far.pump(pair.far) as answerer:
        for nonce in range(100):
            assert sender.offer(Ping(nonce, 0.0), timeout_s=10)
        assert [far.messages.get(timeout=10) for _ in range(100)] == [
            Ping(nonce, 0.0) for nonce in range(100)
        ]
        assert answerer.offer(Goodbye("thanks"))
        assert near.messages.get(timeout=10) == Goodbye("thanks")


def test_both_sides_learn_once_that_the_link_ended(connect: Connect) -> None:
    pair, near, far = connect(), Recorder(), Recorder()
    with near.pump(pair.near) as sender, far.pump(pair.far):
        sender.close()
        sender.close()
        assert isinstance(near.closed.get(timeout=10), LinkClosedError)
        assert isinstance(far.closed.get(timeout=10), LinkClosedError)
    assert near.closed.empty()
    assert far.closed.empty()


def test_a_closed_pump_takes_nothing(connect: Connect) -> None:
    pair, near = connect(), Recorder()
    with near.pump(pair.near) as sender:
        pair.far.close()
        near.closed.get(timeout=10)
        with pytest.raises(LinkClosedError, match="nothing can be sent"):
            sender.offer(Ping(1, 0.0))


def test_draining_sends_what_is_queued(connect: Connect) -> None:
    pair, near, far = connect(), Recorder(), Recorder()
    with far.pump(pair.far):
        sender = near.pump(pair.near)
        for nonce in range(20):
            assert sender.offer(Ping(nonce, 0.0))
        sender.start()
        sender.close(drain_s=10)
        far.closed.get(timeout=10)
    assert far.messages.qsize() == 20


def test_a_full_queue_refuses_and_room_wakes_who_waits(connect: Connect) -> None:
    pair, near = connect(), Recorder()
    sender = near.pump(pair.near, capacity_frames=1)
    assert sender.offer(Ping(1, 0.0))
    assert not sender.offer(Ping(2, 0.0))
    assert not sender.offer(Ping(2, 0.0), timeout_s=0.01)
    with sender:
        assert sender.offer(Ping(2, 0.0), timeout_s=None)
        assert [pair.far.receive(10)[0].nonce for _ in range(2)] == [1, 2]


def test_closing_wakes_who_waits_for_room(connect: Connect) -> None:
    pair, near = connect(), Recorder()
    sender = near.pump(pair.near, capacity_frames=1)
    sender.offer(Ping(1, 0.0))
    outcome: queue.Queue[object] = queue.Queue()

    def offer() -> None:
        try:
            outcome.put(sender.offer(Ping(2, 0.0), timeout_s=20))
        except LinkClosedError as error:
            outcome.put(error)

    thread = threading.Thread(target=offer)
    thread.start()
    sender.close()
    thread.join(10)
    assert isinstance(outcome.get(timeout=10), LinkClosedError)


def test_a_callback_that_fails_ends_the_link_with_its_reason(connect: Connect) -> None:
    pair, near, far = connect(), Recorder(), Recorder()

    def refuse(message: Message, body: memoryview) -> None:
        raise KeyError("no such session")

    with near.pump(pair.near) as sender, LinkPump(pair.far, refuse, far.closed.put):
        sender.offer(Ping(1, 0.0))
        failure = far.closed.get(timeout=10)
        assert "taking in Ping failed" in failure.message
        assert isinstance(failure.__cause__, KeyError)
        assert isinstance(near.closed.get(timeout=10), LinkClosedError)


def test_a_message_that_cannot_be_sent_ends_the_link_with_its_reason(connect: Connect) -> None:
    pair, near = connect(), Recorder()
    with near.pump(pair.near) as sender:
        sender.offer(Ping(1, 0.0), [b"a body that pings do not have"])
        assert "Ping has no body" in near.closed.get(timeout=10).message


def test_callbacks_may_close_the_pump(connect: Connect) -> None:
    pair, far = connect(), Recorder()
    pumps: list[LinkPump] = []

    def close(message: Message, body: memoryview) -> None:
        pumps[0].close()

    def closed(error: LinkError) -> None:
        pumps[0].close()
        far.closed.put(error)

    pumps.append(LinkPump(pair.far, close, closed))
    with pumps[0]:
        pair.near.send(Ping(1, 0.0))
        assert isinstance(far.closed.get(timeout=10), LinkClosedError)


def test_a_pump_that_never_started_just_closes_its_link(connect: Connect) -> None:
    pair, near = connect(), Recorder()
    near.pump(pair.near).close()
    with pytest.raises(LinkClosedError):
        pair.far.receive(10)
    assert near.closed.empty()


def test_what_went_out_is_told_with_the_time_it_took(connect: Connect) -> None:
    pair, near, far = connect(), Recorder(), Recorder()
    sent: queue.Queue[tuple[int, float]] = queue.Queue()
    tell = lambda size, seconds: sent.put((size, seconds))  # noqa: E731
    with near.pump(pair.near, on_sent=tell) as sender, far.pump(pair.far):
        sender.offer(TensorBytes(1, 12), (memoryview(b"12345678"), memoryview(b"1234")))
        size, seconds = sent.get(timeout=10)
    assert size == 12
    assert seconds > 0
