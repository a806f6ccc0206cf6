from __future__ import annotations

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError, UsageError
from shardcompute.wire import Hello, InprocTransport, LinkOptions, Ping, SegmentHeader, StepFrame, pack_ids

ME = Hello(1, 1, "me", "worker", "home")
IMPATIENT = LinkOptions(frame_timeout_s=0.05)


def test_a_full_queue_holds_the_sender_back() -> None:
    transport = InprocTransport(capacity_frames=2)
    with transport.listen("inproc://a", ME) as listener:
        near, far = transport.dial("inproc://a", ME, IMPATIENT), listener.accept(0)
        for nonce in range(2):
            near.send(Ping(nonce, 0.0))
        assert far.receive(0)[0] == Ping(0, 0.0)
        near.send(Ping(2, 0.0))
        with pytest.raises(LinkError, match="me took no frame"):
            near.send(Ping(3, 0.0))


def test_severing_loses_what_is_on_its_way() -> None:
    transport = InprocTransport()
    with transport.listen("inproc://a", ME) as listener:
        near, far = transport.dial("inproc://a", ME), listener.accept(0)
        near.send(Ping(1, 0.0))
        near.sever()
        with pytest.raises(LinkClosedError):
            far.receive(0)
        with pytest.raises(LinkClosedError):
            far.send(Ping(2, 0.0))


def test_names_belong_to_one_transport_and_are_free_after_close() -> None:
    transport, other = InprocTransport(), InprocTransport()
    with (
        transport.listen("inproc://a", ME),
        other.listen("inproc://a", ME),
        pytest.raises(LinkError, match="already in use"),
    ):
        transport.listen("inproc://a", ME)
    with pytest.raises(LinkError, match="nobody listens"):
        transport.dial("inproc://a", ME)
    transport.listen("inproc://a", ME).close()


def test_a_listener_takes_a_bounded_number_of_links() -> None:
    transport = InprocTransport()
    with transport.listen("inproc://a", ME, LinkOptions(max_pending=1)) as listener:
        waiting = transport.dial("inproc://a", ME)
        with pytest.raises(LinkError, match="accepts no links"):
            transport.dial("inproc://a", ME)
        listener.accept(0)
        transport.dial("inproc://a", ME)
    waiting.send(Ping(1, 0.0))
    with pytest.raises(LinkClosedError):
        listener.accept(0)


def test_a_closed_listener_drops_links_that_were_not_accepted() -> None:
    transport = InprocTransport()
    listener = transport.listen("inproc://a", ME)
    link = transport.dial("inproc://a", ME)
    listener.close()
    with pytest.raises(LinkClosedError):
        link.receive(0)


def test_bodies_are_not_shared() -> None:
    transport = InprocTransport()
    with transport.listen("inproc://a", ME) as listener:
        near, far = transport.dial("inproc://a", ME), listener.accept(0)
        body = bytearray(b"abcd")
        near.send(StepFrame("c", 1, 1, [SegmentHeader(1, 0, 1, 1, pack_ids([1]))], 1, 1, "exact"), [body])
        body[:] = b"wxyz"
        assert bytes(far.receive(0)[1]) == b"abcd"


def test_a_url_without_a_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="names no listener"):
        InprocTransport().listen("inproc://", ME)
