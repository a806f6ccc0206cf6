"""The ladder between two nodes on loopback: which rung is taken when others do not lead anywhere."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.node.reach import reach as reach_room
from shardcompute.node.reach import relays as relays_room
from shardcompute.node.reach import upgrades as upgrades_room
from shardcompute.node.reach.offers import MeetAnswer, MeetOffer, RelayDistance, decode_said, encode_said
from shardcompute.node.reach.own_addresses import own_addresses
from shardcompute.node.reach.punch import PunchPort
from shardcompute.node.reach.reach import Reach
from shardcompute.node.reach.rungs import CALLBACK, DIRECT, PUNCHED, RELAYED
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.relay.server import RelayServer
from shardcompute.wire import Link, Ping, Pong, TcpTransport, Transports
from shardcompute.wire.control import TensorBytes
from support.network.lab_links import wait_until
from support.network.papers import Papers
from support.network.relays import WAIT_S, open_relay, pass_of

NOWHERE = "127.77.0.1"
"""An address of this machine at which nobody listens."""


def echo(link: Link) -> None:
    while True:
        message, _ = link.receive()
        assert isinstance(message, Ping)
        link.send(Pong(message.nonce, 0.0))


def is_answered(link: Link) -> bool:
    link.send(Ping(7, 0.0))
    return link.receive(WAIT_S)[0] == Pong(7, 0.0)


def give_back(link: Link) -> None:
    """What came, as it came."""
    message, body = link.receive()
    link.send(message, (body,))
    echo(link)


class Home:
    """Two nodes, a relay, and a coordinator that carries their offers."""

    def __init__(self, papers: Papers, relay: RelayServer, stack: ExitStack) -> None:
        self.offers: list[MeetOffer] = []
        self._papers = papers
        self._relay = relay
        self._stack = stack
        self._endpoints: dict[str, Endpoint] = {}
        self._port = relay.port

    def node(self, name: str, *, is_open: bool, relays: Sequence[str] = ("tcp",)) -> Endpoint:
        """One that is found where it listens, or nowhere. It reaches these doors of the relay."""
        credentials = self._papers.node(name)
        endpoint = Endpoint(
            credentials,
            "tcp://127.0.0.1:0",
            {"stage": echo, "weights": give_back},
            # Not through sockets of this machine, by which everybody is reached.
            transports=Transports({"tcp": TcpTransport()}),
            advertise="" if is_open else NOWHERE,
        )
        self._stack.callback(endpoint.close)
        self._stack.enter_context(
            mock.patch.object(Endpoint, "addresses", property(lambda each: (each.url,)))
        )
        endpoint.start()
        reach = self.reach(endpoint)
        reach.meet_through(lambda node, offer: self._carry(endpoint.node, node, offer))
        if relays:
            reach.learn(
                pass_of(self._papers, credentials), [[f"{each}://127.0.0.1:{self._port}" for each in relays]]
            )
            assert reach.relays.is_measured.wait(WAIT_S)
        self._endpoints[endpoint.node] = endpoint
        return endpoint

    @property
    def relay_port(self) -> int:
        return self._relay.port

    @contextlib.contextmanager
    def relay_at(self, port: int) -> Iterator[None]:
        """Nodes that come now find the relay there."""
        self._port = port
        yield
        self._stack.close()

    def reach(self, endpoint: Endpoint) -> Reach:
        assert endpoint.reach is not None
        return endpoint.reach

    def _carry(self, caller: str, node: str, offer: bytes) -> bytes:
        self.offers.append(decode_said(offer, MeetOffer))
        return self.reach(self._endpoints[node]).answer(caller, offer)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    papers = Papers.found(tmp_path)
    with ExitStack() as stack, open_relay(papers) as relay:
        yield Home(papers, relay, stack)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, the better way is tried to its end first."""
    for name in ("HEAD_START_S", "_RELAY_AFTER_S", "_OBSERVE_S"):
        monkeypatch.setattr(reach_room, name, WAIT_S)


@pytest.mark.usefixtures("unhurried")
def test_a_node_that_can_be_dialled_is_met_by_nobody(home: Home) -> None:
    a, b = home.node("a", is_open=True), home.node("b", is_open=True)
    with a.dial(b.url, "stage", b.node) as link:
        assert is_answered(link)
        assert link.stats.rung == DIRECT
    assert home.offers == []


def test_a_node_that_cannot_be_dialled_calls_back(home: Home) -> None:
    a, b = home.node("a", is_open=True), home.node("b", is_open=False, relays=())
    with a.dial(b.url, "stage", b.node) as link:
        assert is_answered(link)
        assert link.stats.rung == CALLBACK
        assert link.peer == b.node


@pytest.mark.usefixtures("unhurried")
def test_two_that_cannot_be_dialled_dial_each_other_at_once(home: Home) -> None:
    a, b = home.node("a", is_open=False), home.node("b", is_open=False)
    with a.dial(b.url, "stage", b.node) as link:
        assert is_answered(link)
        assert link.stats.rung == PUNCHED


def test_what_a_meeting_opened_for_a_race_that_is_over_is_closed(home: Home) -> None:
    """The node answers where it says after all, before the two have found each other."""
    a, b = home.node("a", is_open=True), home.node("b", is_open=True)
    reach, is_meeting, is_over = home.reach(a), threading.Event(), threading.Event()
    ports: list[PunchPort | None] = []
    punch_port, dial_direct = reach.relays.punch_port, a.dial_direct

    def opened(timeout_s: float) -> PunchPort | None:
        ports.append(punch_port(WAIT_S))
        return ports[-1]

    def dialled_late(*call: str) -> Link:
        assert is_meeting.wait(WAIT_S)
        return dial_direct(*call)

    def carried(node: str, offer: bytes) -> bytes:
        is_meeting.set()
        assert is_over.wait(WAIT_S)
        return encode_said(MeetAnswer((), "tcp://127.0.0.1:9", ()))

    reach.meet_through(carried)
    with (
        mock.patch.object(reach.relays, "punch_port", opened),
        mock.patch.object(a, "dial_direct", dialled_late),
        a.dial(b.url, "stage", b.node),
    ):
        is_over.set()
        wait_until(
            lambda: not any(each.name.endswith(f"to {b.node}") for each in threading.enumerate()),
            "the attempts end",
            WAIT_S,
        )
    [port] = ports
    assert port is not None
    with pytest.raises(LinkError, match="is closed"):
        port._door._socket()
    assert reach.callbacks._expected == {}


@pytest.mark.parametrize("doors", [(["wss"], ["tcp"]), (["ws"], ["wss"])])
def test_the_relay_is_the_last_resort(home: Home, doors: tuple[list[str], list[str]]) -> None:
    """Through a WebSocket nobody sees a port to punch with."""
    # Both name it by its first door, whichever they use.
    with mock.patch.object(relays_room, "_measured", _by_port):
        a = home.node("a", is_open=False, relays=doors[0])
        b = home.node("b", is_open=False, relays=doors[1])
    with a.dial(b.url, "stage", b.node) as link:
        assert is_answered(link)
        assert link.stats.rung == RELAYED


def _by_port(doors: Sequence[str]) -> relays_room.KnownRelay:
    return relays_room.KnownRelay("the relay", doors[0], 0.001)


def test_the_error_says_of_every_rung_why_it_failed(home: Home) -> None:
    a = home.node("a", is_open=False, relays=())
    b = home.node("b", is_open=False, relays=())
    with (
        mock.patch("shardcompute.node.reach.reach._CALLBACK_S", 0.2),
        pytest.raises(LinkError) as raised,
    ):
        a.dial(b.url, "stage", b.node)
    assert "direct: tcp://127.77.0.1" in raised.value.message
    assert "callback: " in raised.value.message


def test_a_role_that_is_not_served_is_refused_on_every_rung(home: Home) -> None:
    a, b = home.node("a", is_open=True), home.node("b", is_open=False)
    with mock.patch("shardcompute.node.reach.reach._CALLBACK_S", 0.5), pytest.raises(LinkError):
        a.dial(b.url, "generations", b.node)


def test_nobody_calls_back_who_was_not_asked(home: Home) -> None:
    a, b = home.node("a", is_open=True), home.node("b", is_open=True)
    reach = home.reach(a)
    meeting = bytes(16)
    with pytest.raises(LinkError, match="does not serve links of role"):
        b.dial_direct(a.url, reach.callbacks.role(meeting), a.node)
    with reach_expecting(reach, meeting, "somebody else"), pytest.raises(LinkError, match="does not serve"):
        b.dial_direct(a.url, reach.callbacks.role(meeting), a.node)


class reach_expecting:  # noqa: N801
    def __init__(self, reach: Reach, meeting: bytes, node: str) -> None:
        self._expected = reach.callbacks.expect(meeting, node)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._expected.close()


def test_another_node_at_the_address_is_not_the_one_that_was_wanted(home: Home) -> None:
    """Private addresses are the same in many homes."""
    a, b = home.node("a", is_open=True), home.node("b", is_open=False)
    neighbour = home.node("neighbour", is_open=True)
    with a.dial(neighbour.url, "stage", b.node) as link:
        assert link.peer == b.node
        assert is_answered(link)


def test_a_link_through_a_relay_is_ended_where_its_peer_is_revoked(home: Home) -> None:
    from shardcompute.security import Revocations

    with mock.patch.object(relays_room, "_measured", _by_port):
        a, b = home.node("a", is_open=False, relays=["ws"]), home.node("b", is_open=False, relays=["ws"])
    with a.dial(b.url, "stage", b.node) as link:
        assert is_answered(link)
        b.heed(Revocations().with_node(a.node))
        with pytest.raises(LinkError):
            link.receive(WAIT_S)


@pytest.mark.parametrize("opened", ["punching", "an address"])
def test_a_relayed_link_moves_to_a_better_way_without_losing_a_frame(home: Home, opened: str) -> None:
    a, b = home.node("a", is_open=False), home.node("b", is_open=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(upgrades_room, "_WAITS_S", (0.05,)))
        closed = stack.enter_context(contextlib.ExitStack())
        closed.enter_context(mock.patch.object(relays_room.RelayBook, "punch_port", return_value=None))
        link = stack.enter_context(a.dial(b.url, "stage", b.node))
        assert link.stats.rung == RELAYED
        if opened == "punching":
            closed.close()
        else:
            near = property(lambda each: (each._near_url,))
            stack.enter_context(mock.patch.object(Endpoint, "addresses", near))
        sent, received = itertools.count(), 0
        deadline = time.monotonic() + WAIT_S
        # Always some on their way, so that none of them can be passed over unnoticed.
        for _ in range(20):
            link.send(Ping(next(sent), 0.0))
        while link.stats.rung == RELAYED or received < 2000:
            assert time.monotonic() < deadline
            assert link.receive(WAIT_S)[0] == Pong(received, 0.0)
            received += 1
            link.send(Ping(next(sent), 0.0))
        for number in range(received, next(sent)):
            assert link.receive(WAIT_S)[0] == Pong(number, 0.0)
        assert link.stats.rung == PUNCHED if opened == "punching" else link.stats.rung in (DIRECT, CALLBACK)


def test_a_link_moves_to_no_way_that_was_not_chosen(home: Home) -> None:
    """Of two ways that come through at once, whoever tries closes one."""
    a, b = home.node("a", is_open=False), home.node("b", is_open=False)
    with (
        mock.patch.object(upgrades_room, "_WAITS_S", (WAIT_S,)),
        mock.patch.object(relays_room.RelayBook, "punch_port", return_value=None),
        a.dial(b.url, "stage", b.node) as link,
    ):
        waiting = home.reach(b).upgrades._links
        wait_until(lambda: len(waiting) == 1, "its other end expects a better way", WAIT_S)
        [role] = waiting
        with a.dial_direct(b._near_url, role, b.node):
            assert all(is_answered(link) for _ in range(50))
        assert all(is_answered(link) for _ in range(50))
        assert link.stats.rung == RELAYED


def test_nobody_moves_a_link_but_its_own_ends(home: Home) -> None:
    a, b = home.node("a", is_open=True), home.node("b", is_open=True)
    with pytest.raises(LinkError, match="does not serve links of role"):
        b.dial_direct(a.url, upgrades_room.upgrade_role(bytes(16)), a.node)


class Wiretap:
    """Passes everything on to a relay and writes it down."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.heard = bytearray()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._copy, args=(source, target))
                    self._threads.append(thread)
                    thread.start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


def test_a_relay_sees_no_plaintext(home: Home) -> None:
    """All that goes to and from it is written down, and the words are not in it."""
    words = b"hidden states can be turned back into words. " * 500
    with contextlib.closing(Wiretap(home.relay_port)) as tap, home.relay_at(tap.port):
        a = home.node("a", is_open=False)
        b = home.node("b", is_open=False)
        with (
            mock.patch.object(relays_room.RelayBook, "punch_port", return_value=None),
            a.dial(b.url, "weights", b.node) as link,
        ):
            assert link.stats.rung == RELAYED
            link.send(TensorBytes(1, len(words)), (memoryview(words),))
            _, body = link.receive(WAIT_S)
            assert bytes(body) == words
    assert len(tap.heard) > 4 * len(words)  # there and back, in at one side and out at the other
    assert words[:16] not in tap.heard
    assert b.node.encode() in tap.heard  # who wants to meet whom is no secret to it


def test_offers_that_say_too_much_are_refused() -> None:
    offer = MeetOffer(bytes(16), "stage", ("tcp://h:1",), "tcp://h:2", (RelayDistance("tcp://r:1", 0.1),))
    assert decode_said(encode_said(offer), MeetOffer) == offer
    for wrong in (
        encode_said(MeetOffer(bytes(15), "stage")),
        encode_said(MeetOffer(bytes(16), "stage", ("tcp://h:1",) * 13)),
        encode_said(MeetOffer(bytes(16), "stage", seen="x" * 301)),
        encode_said(MeetOffer(bytes(16), "stage", relays=(RelayDistance("r", -1.0),))),
        encode_said(MeetAnswer(("u" * 301,))),
        bytes(9000),
        b"",
        b"\xc1",
    ):
        with pytest.raises(LinkError):
            decode_said(wrong, MeetOffer)


def test_a_listener_everywhere_is_found_at_each_address_and_one_at_its_own() -> None:
    assert own_addresses("10.1.2.3", 7, "tcp://home.example:7") == (
        "tcp://home.example:7",
        "tcp://10.1.2.3:7",
    )
    everywhere = own_addresses("0.0.0.0", 7)
    assert all("127." not in each and each.endswith(":7") for each in everywhere)
