from __future__ import annotations

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.wire import Body, Goodbye, Hello, InprocTransport, Message, Refused, Welcome, negotiate
from shardcompute.wire.handshake import introduce

OURS = Hello(2, 4, "answerer", "worker", "home")


@pytest.mark.parametrize(("offered", "chosen"), [((1, 3), 3), ((4, 9), 4), ((2, 4), 4), ((1, 2), 2)])
def test_the_highest_common_version_is_chosen(offered: tuple[int, int], chosen: int) -> None:
    assert negotiate(Hello(*offered, "dialler", "worker", "home"), OURS) == Welcome(chosen, "answerer")


@pytest.mark.parametrize("offered", [(1, 1), (5, 9), (4, 2)])
def test_without_a_common_version_the_link_is_refused(offered: tuple[int, int]) -> None:
    reply = negotiate(Hello(*offered, "dialler", "worker", "home"), OURS)
    assert isinstance(reply, Refused)
    assert f"2 to 4, not {offered[0]} to {offered[1]}" in reply.reason


def test_the_dialler_learns_why_it_is_refused() -> None:
    transport = InprocTransport()
    with (
        transport.listen("inproc://home", OURS) as listener,
        pytest.raises(LinkError, match="belongs to cluster 'home', not 'work'"),
    ):
        transport.dial(listener.address, Hello(2, 4, "dialler", "worker", "work"))


class Stub:
    """A peer that gives one answer, whatever it is told."""

    address = "stub"
    certificate = None

    def __init__(self, reply: Message | None) -> None:
        self.reply = reply

    def send(self, message: Message, body: Body = ()) -> None:
        assert message == OURS

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]:
        if self.reply is None:
            raise TimeoutError
        return self.reply, memoryview(b"")


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Welcome(5, "n"), "version 5, which was not offered"),
        (Welcome(1, "n"), "version 1, which was not offered"),
        (Goodbye("no"), "answers a greeting with Goodbye"),
        (None, "did not introduce itself within 3 s"),
    ],
)
def test_a_wrong_answer_is_refused(reply: Message | None, says: str) -> None:
    with pytest.raises(LinkError, match=says):
        introduce(Stub(reply), OURS, 3)


def test_a_peer_is_judged_by_what_it_says() -> None:
    transport = InprocTransport()
    seen: list[tuple[Hello, bytes | None]] = []

    def admit(hello: Hello, certificate: bytes | None) -> str | None:
        seen.append((hello, certificate))
        return "drivers only" if hello.role != "driver" else None

    driver = Hello(2, 4, "d", "driver", "home")
    with transport.listen("inproc://home", OURS, admit=admit) as listener:
        with pytest.raises(LinkError, match="drivers only"):
            transport.dial(listener.address, Hello(2, 4, "w", "worker", "home"))
        with transport.dial(listener.address, driver), listener.accept(0) as accepted:
            assert (accepted.peer, accepted.role, accepted.version) == ("d", "driver", 4)
        with pytest.raises(TimeoutError):
            listener.accept(0)
    assert seen[-1] == (driver, None)
