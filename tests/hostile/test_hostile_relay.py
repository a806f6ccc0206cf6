"""Whatever strangers and members say at a relay's door, it goes on serving, and keeps little of it."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from shardcompute.core.errors import AuthError, LinkError
from shardcompute.relay.messages import PREAMBLE, Enter, Meet, Meeting, pack, pack_meeting, unpack
from shardcompute.relay.server import RelayLimits
from shardcompute.relay.tickets import read_ticket
from shardcompute.relay.websocket import FrameDecoder, encode_frame, request_head
from support.network.lab_links import wait_until
from support.network.papers import Papers
from support.network.relays import WAIT_S, new_meeting, open_relay, pass_of, read_exactly, spliced, url_of

VISITS = 200


def test_a_relay_outlives_whatever_is_said_at_its_door(tmp_path: Path) -> None:
    papers, dice = Papers.found(tmp_path), random.Random(14)
    a, b = papers.node("a"), papers.node("b")
    shown = pass_of(papers, a)
    request = pack_meeting(Meeting(new_meeting(), b.identity.node_id))
    honest = [
        PREAMBLE + pack(Meet(shown.ticket, request, bytes(64))),
        PREAMBLE + pack(Enter("links")),
        request_head("relay")[0] + encode_frame(PREAMBLE, masks=True),
        b"\x16\x03\x01\x02\x00\x01" + dice.randbytes(200),
    ]
    with open_relay(papers, limits=RelayLimits(door_s=2.0, meet_s=1.0)) as relay:
        for _ in range(VISITS):
            said = bytearray(dice.choice(honest))
            for _ in range(dice.choice((0, 1, 3, 10))):
                said[dice.randrange(len(said))] = dice.randrange(256)
            del said[dice.randrange(len(said)) :: dice.choice((1, len(said)))]
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", relay.port), WAIT_S) as sock,
            ):
                sock.sendall(said)
        one, other = spliced(papers, (url_of(relay), url_of(relay, "wss")), a, b)
        with one, other:
            one.sendall(b"still here")
            assert read_exactly(other, 10) == b"still here"
        wait_until(lambda: relay.view().connections == 0, lambda: str(relay.view()), WAIT_S)


def test_a_hundred_links_of_slow_readers_take_little_memory(tmp_path: Path) -> None:
    papers = Papers.found(tmp_path)
    a, b = papers.node("a"), papers.node("b")
    limits = RelayLimits(links_per_member=100, bytes_per_s=1e12)
    with open_relay(papers, limits=limits) as relay, contextlib.ExitStack() as held:
        urls = (url_of(relay), url_of(relay))
        links = [spliced(papers, urls, a, b) for _ in range(100)]
        for each in links:
            for sock in each:
                held.callback(sock.close)
        before = psutil.Process().memory_info().rss
        content = bytes(1 << 16)
        for sender, receiver in links:
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sender.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                for _ in range(48):
                    sender.sendall(content)
        assert relay.view().connections == 200
        # Per link and direction a read, and what is not written yet; the rest waits in the system's buffers.
        assert psutil.Process().memory_info().rss - before < 64 << 20
        for _, receiver in links[::10]:
            assert len(read_exactly(receiver, 1 << 16)) == 1 << 16


@given(st.binary(max_size=400))
def test_nothing_but_a_link_error_comes_of_any_message(content: bytes) -> None:
    with contextlib.suppress(LinkError):
        unpack(content)


@given(st.binary(max_size=400))
def test_nothing_but_a_link_error_comes_of_any_frames(content: bytes) -> None:
    decoder = FrameDecoder(is_server=True)
    with contextlib.suppress(LinkError):
        assert len(decoder.feed(content)) <= len(content)
        assert len(decoder.take_replies()) <= 2 * len(content)


@given(st.lists(st.binary(max_size=70_000), max_size=4), st.booleans(), st.integers(1, 5000))
def test_frames_carry_what_was_put_in_however_they_are_cut(
    pieces: list[bytes], is_server: bool, size: int
) -> None:
    stream = b"".join(encode_frame(piece, masks=is_server) for piece in pieces)
    decoder = FrameDecoder(is_server=is_server)
    carried = b"".join(decoder.feed(stream[at : at + size]) for at in range(0, len(stream), size))
    assert carried == b"".join(pieces)


_KEY = Ed25519PrivateKey.generate().public_key().public_bytes_raw()


@given(st.binary(max_size=600))
def test_what_nobody_signed_is_no_ticket(content: bytes) -> None:
    with pytest.raises(AuthError, match="ticket"):
        read_ticket(content, _KEY, now_s=0.0)
