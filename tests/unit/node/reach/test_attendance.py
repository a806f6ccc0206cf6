"""A coordinator that waits at relays elsewhere: who is led to it, who may wait, and what becomes of relays that die."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.node.reach import attendance as attendance_room
from shardcompute.node.reach.attendance import RelayAttendance
from shardcompute.relay.client import RelayDoor
from shardcompute.relay.messages import AwaitVisitor, attendance_of
from shardcompute.relay.server import RelayLimits, RelayServer
from shardcompute.relay.tickets import prove_ticket
from support.network.lab_links import wait_until
from support.network.papers import Papers
from support.network.relays import WAIT_S, key_of, open_relay, pass_of, read_exactly, url_of


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers.found(tmp_path)


class Coordinator:
    """Greets whoever comes with the name of the entry, and keeps the connection."""

    def __init__(self, papers: Papers, relays: list[list[str]]) -> None:
        shown = pass_of(papers, papers.node("coordinator"), attends=True)
        self.came: SimpleQueue[str] = SimpleQueue()
        self._kept: list[socket.socket] = []
        self._attendance = RelayAttendance(
            relays, lambda: shown, {"links": self._greeter("links"), "join": self._greeter("join")}
        )

    def _greeter(self, entry: str) -> attendance_room.Serve:
        def greet(sock: socket.socket) -> None:
            self._kept.append(sock)
            sock.sendall(entry.encode())
            self.came.put(entry)

        return greet

    def close(self) -> None:
        self._attendance.close()
        for sock in self._kept:
            sock.close()


@contextlib.contextmanager
def coordinator(papers: Papers, relays: list[list[str]]) -> Iterator[Coordinator]:
    with contextlib.closing(Coordinator(papers, relays)) as opened:
        yield opened


def enter(url: str, entry: str) -> bytes:
    """What whoever enters hears first, once somebody waits there."""
    said: list[bytes] = []

    def try_it() -> bool:
        try:
            with RelayDoor(url, WAIT_S) as door, door.enter(entry, WAIT_S) as sock:
                said.append(read_exactly(sock, len(entry)))
        except LinkError:
            return False
        return True

    wait_until(try_it, f"somebody waits at {url}", WAIT_S)
    return said[0]


def test_whoever_enters_is_led_to_the_coordinator_that_waits(papers: Papers) -> None:
    with open_relay(papers) as relay, coordinator(papers, [[url_of(relay)]]):
        for entry in ("links", "join"):
            for scheme in ("relay", "wss", "tcp"):
                assert enter(url_of(relay, scheme), entry) == entry.encode()


def test_more_come_at_once_than_wait_there(papers: Papers) -> None:
    with (
        open_relay(papers) as relay,
        coordinator(papers, [[url_of(relay)]]) as there,
        contextlib.ExitStack() as held,
    ):
        for _ in range(10):
            enter_once(relay, held)
        assert [there.came.get(timeout=WAIT_S) for _ in range(10)] == ["links"] * 10


def enter_once(relay: RelayServer, held: contextlib.ExitStack) -> None:
    def try_it() -> bool:
        try:
            with RelayDoor(url_of(relay), WAIT_S) as door:
                held.enter_context(door.enter("links", WAIT_S))
        except LinkError:
            return False
        return True

    wait_until(try_it, "somebody waits again", WAIT_S)


def test_a_relay_that_comes_back_is_attended_again(papers: Papers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance_room, "_AGAIN_S", (0.05,))
    with open_relay(papers) as first:
        port = first.port
        with coordinator(papers, [[url_of(first)]]):
            assert enter(url_of(first), "links") == b"links"
            first.close()
            with RelayServer("127.0.0.1", port, key_of(papers.authority)) as again:
                assert enter(url_of(again), "links") == b"links"


def test_members_and_strangers_do_not_wait_in_a_coordinators_place(papers: Papers, tmp_path: Path) -> None:
    member = papers.node("member")
    stranger = Papers.found(tmp_path / "other")
    with open_relay(papers) as relay:
        for shown, why in (
            (pass_of(papers, member), "is no coordinator"),
            (pass_of(stranger, stranger.node("x"), attends=True), "not of this relay's cluster"),
            (pass_of(papers, member, attends=True, life_s=-10.0), "expired"),
        ):
            with RelayDoor(url_of(relay), WAIT_S) as door, pytest.raises(LinkError, match=why):
                door.attend(shown, "links", WAIT_S)
        good = pass_of(papers, member, attends=True)
        with RelayDoor(url_of(relay), WAIT_S) as door, pytest.raises(LinkError, match="nobody enters"):
            door.attend(good, "secrets", WAIT_S)
        # What was signed for one entry is not good for another.
        with RelayDoor(url_of(relay), WAIT_S) as door:
            proof = prove_ticket(good.identity, door._nonce, attendance_of("join"))
            with pytest.raises(LinkError, match="shown by somebody else"):
                door._splice(AwaitVisitor(good.ticket, "links", proof), WAIT_S)
        with RelayDoor(url_of(relay), WAIT_S) as door, pytest.raises(LinkError, match="no server called"):
            door.enter("links", WAIT_S)


def test_the_oldest_of_too_many_makes_room(papers: Papers) -> None:
    shown = pass_of(papers, papers.node("coordinator"), attends=True)
    ends: SimpleQueue[int] = SimpleQueue()

    def wait(number: int, door: RelayDoor) -> None:
        with contextlib.suppress(LinkError), door:
            door.attend(shown, "links", WAIT_S).close()
        ends.put(number)

    with open_relay(papers, limits=RelayLimits(attending=2)) as relay:
        threads = []
        for number in range(3):
            door = RelayDoor(url_of(relay), WAIT_S)
            threads.append(threading.Thread(target=wait, args=(number, door)))
            threads[-1].start()
            wait_until(lambda: relay.view().connections >= min(len(threads), 2), "it waits", WAIT_S)
        assert ends.get(timeout=WAIT_S) == 0
        relay.close()
        for thread in threads:
            thread.join()
