"""What waits for pictures waits in order, and nobody else waits with it."""

from __future__ import annotations

import threading

from shardcompute.runtime.picture_encoding import PictureEncoding

PATIENCE_S = 30.0


class Tower:
    """Encodes when the test says so."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.woken = threading.Semaphore(0)
        self.encoding: PictureEncoding[str] = PictureEncoding(self.woken.release)

    def encode(self) -> None:
        assert self.may_go.wait(PATIENCE_S)

    def wait(self) -> None:
        assert self.woken.acquire(timeout=PATIENCE_S)


def test_others_go_on_while_a_session_waits() -> None:
    tower = Tower()
    holds = tower.encoding.holds
    assert not holds("text", [1])
    assert holds("picture", [2], tower.encode)
    assert not holds("text", [1])
    assert holds("its next rows, beside others'", [1, 2])
    assert holds("what they wait with", [1])
    assert holds("its end", [2])
    assert tower.encoding.take_ready() == []
    tower.may_go.set()
    tower.wait()
    expected = ["picture", "its next rows, beside others'", "what they wait with", "its end"]
    assert tower.encoding.take_ready() == expected
    assert not holds("text", [2])


def test_pictures_of_several_sessions_come_one_after_the_other() -> None:
    tower = Tower()
    first, second = Tower(), Tower()
    assert tower.encoding.holds("a", [1], first.encode)
    assert tower.encoding.holds("b", [2], second.encode)
    assert tower.encoding.holds("after b", [2])
    first.may_go.set()
    tower.wait()
    assert tower.encoding.take_ready() == ["a"]
    second.may_go.set()
    tower.wait()
    assert tower.encoding.take_ready() == ["b", "after b"]


def test_what_cannot_be_encoded_is_for_the_step_to_say() -> None:
    tower = Tower()

    def fail() -> None:
        raise RuntimeError("no such picture")

    assert tower.encoding.holds("a", [1], fail)
    tower.wait()
    assert tower.encoding.take_ready() == ["a"]
    tower.may_go.set()
    assert tower.encoding.holds("b", [1], tower.encode), "and the next one is encoded as ever"
    tower.wait()
    assert tower.encoding.take_ready() == ["b"]
