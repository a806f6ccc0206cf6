"""What every link promises, over each kind of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardcompute.core.errors import LinkClosedError, LinkError, UsageError
from shardcompute.wire import (
    VERSION_MAX,
    Goodbye,
    Hello,
    LinkOptions,
    Message,
    Ping,
    SegmentHeader,
    StepFrame,
    WireLimits,
    default_transports,
    find_codec,
    pack_ids,
)

Connect = Callable[..., Any]
IMPATIENT = LinkOptions(frame_timeout_s=0.1, slowest_bytes_per_s=1e12)


def make_frame(sequence: int, rows: int, width: int) -> tuple[StepFrame, list[memoryview]]:
    segment = SegmentHeader(1, 0, rows, 1, pack_ids(range(rows)))
    activations = np.full((rows, width), sequence, np.float32)
    return StepFrame("c", 1, sequence, [segment], rows, width, "exact"), find_codec("exact").encode(
        activations
    )


def in_thread(action: Callable[[], object]) -> Callable[[], object]:
    """Run `action` aside; calling the result waits for it and gives what it returned or raised."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(action())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def finish() -> object:
        thread.join(20)
        assert not thread.is_alive()
        return outcome[0]

    return finish


def test_both_ends_are_introduced(connect: Connect) -> None:
    pair = connect()
    assert (pair.near.peer, pair.near.role, pair.near.version) == ("answerer", "", VERSION_MAX)
    assert (pair.far.peer, pair.far.role, pair.far.version) == ("dialler", "worker", VERSION_MAX)


def test_frames_go_both_ways_in_order(connect: Connect) -> None:
    pair = connect()
    for sequence in range(1, 6):
        frame, body = make_frame(sequence, 3, 5)
        pair.near.send(frame, body)
    pair.far.send(Goodbye("enough"))
    for sequence in range(1, 6):
        message, body = pair.far.receive(10)
        assert isinstance(message, StepFrame)
        assert message.sequence == sequence
        np.testing.assert_array_equal(find_codec("exact").decode(body, 3, 5), sequence)
    assert pair.near.receive(10) == (Goodbye("enough"), b"")


def test_large_frames_both_ways_at_once(connect: Connect) -> None:
    pair = connect()

    def send(link: Any) -> None:
        for sequence in range(1, 9):
            link.send(*make_frame(sequence, 16, 8192))

    def receive(link: Any) -> list[float]:
        return [float(find_codec("exact").decode(link.receive(20)[1], 16, 8192).mean()) for _ in range(1, 9)]

    senders = [in_thread(lambda link=link: send(link)) for link in (pair.near, pair.far)]
    receivers = [in_thread(lambda link=link: receive(link)) for link in (pair.near, pair.far)]
    assert [finish() for finish in senders] == [None, None]
    assert [finish() for finish in receivers] == [[1.0, 2, 3, 4, 5, 6, 7, 8]] * 2


def test_many_threads_may_send(connect: Connect) -> None:
    pair = connect()
    senders = [
        in_thread(lambda first=first: [pair.near.send(Ping(n, 0.0)) for n in range(first, first + 10)])
        for first in (0, 100, 200)
    ]
    received: list[Message] = [pair.far.receive(10)[0] for _ in range(30)]
    for finish in senders:
        finish()
    nonces = [message.nonce for message in received if isinstance(message, Ping)]
    assert sorted(nonces) == [*range(10), *range(100, 110), *range(200, 210)]
    assert [nonce for nonce in nonces if nonce >= 200] == list(range(200, 210))


def test_stats_count_frames_and_bytes(connect: Connect) -> None:
    pair = connect()
    before = pair.near.stats, pair.far.stats
    frame, body = make_frame(1, 2, 64)
    pair.near.send(frame, body)
    pair.near.send(Ping(1, 0.0))
    pair.far.receive(10)
    pair.far.receive(10)
    sent = pair.near.stats.bytes_sent - before[0].bytes_sent
    assert pair.near.stats.frames_sent - before[0].frames_sent == 2
    assert pair.far.stats.frames_received - before[1].frames_received == 2
    assert pair.far.stats.bytes_received - before[1].bytes_received == sent > 2 * 64 * 4


def test_waiting_in_vain_leaves_the_link_usable(connect: Connect) -> None:
    pair = connect()
    with pytest.raises(TimeoutError):
        pair.far.receive(0)
    with pytest.raises(TimeoutError):
        pair.far.receive(0.01)
    pair.near.send(Ping(1, 0.0))
    assert pair.far.receive(10)[0] == Ping(1, 0.0)


def test_what_was_sent_before_a_close_arrives(connect: Connect) -> None:
    pair = connect()
    pair.near.send(Goodbye("done"))
    pair.near.close()
    assert pair.far.receive(10)[0] == Goodbye("done")
    with pytest.raises(LinkClosedError):
        pair.far.receive(10)


def test_a_closed_link_does_nothing_more(connect: Connect) -> None:
    pair = connect()
    pair.near.close()
    pair.near.close()
    with pytest.raises(LinkClosedError):
        pair.near.send(Ping(1, 0.0))
    with pytest.raises(LinkClosedError):
        pair.near.receive(10)


def test_closing_wakes_a_blocked_receive_at_both_ends(connect: Connect) -> None:
    pair = connect()
    waiting = [in_thread(lambda link=link: link.receive(20)) for link in (pair.near, pair.far)]
    pair.near.close()
    assert all(isinstance(finish(), LinkClosedError) for finish in waiting)


def test_closing_wakes_a_blocked_send(connect: Connect) -> None:
    pair = connect()

    def flood() -> None:
        while True:
            pair.near.send(*make_frame(1, 16, 8192))

    finish = in_thread(flood)
    pair.far.receive(10)
    pair.near.close()
    assert isinstance(finish(), LinkClosedError)


def test_a_peer_that_does_not_read_is_given_up(connect: Connect) -> None:
    pair = connect(near=IMPATIENT)
    with pytest.raises(LinkError, match=r"reads too slowly|took no frame"):  # noqa: PT012
        while True:
            pair.near.send(*make_frame(1, 16, 8192))
    with pytest.raises(LinkClosedError):
        pair.near.send(Ping(1, 0.0))


def test_a_frame_over_our_own_limits_is_not_sent_and_does_no_harm(connect: Connect) -> None:
    pair = connect(near=LinkOptions(limits=WireLimits(max_rows=2)))
    with pytest.raises(LinkError, match="over the limit of 2"):
        pair.near.send(*make_frame(1, 3, 4))
    pair.near.send(Ping(1, 0.0))
    assert pair.far.receive(10)[0] == Ping(1, 0.0)


def test_a_frame_over_the_receivers_limits_ends_the_link(connect: Connect) -> None:
    pair = connect(far=LinkOptions(limits=WireLimits(max_body_bytes=8)))
    pair.near.send(*make_frame(1, 3, 4))
    with pytest.raises(LinkError, match="body of 48 bytes is over the limit of 8"):
        pair.far.receive(10)
    with pytest.raises(LinkClosedError):
        pair.far.send(Ping(1, 0.0))
    with pytest.raises(LinkClosedError):
        pair.near.receive(10)


@pytest.mark.parametrize("url", ["carrier-pigeon://loft", "tcp:host", "", "127.0.0.1:80"])
def test_an_unknown_scheme_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="no known scheme"):
        default_transports().dial(url, Hello(1, 1, "n", "worker", "home"))
