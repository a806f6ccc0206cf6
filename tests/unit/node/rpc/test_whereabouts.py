"""A node notices that its address changed or that its machine slept, and finds its coordinator elsewhere."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import LinkError
from shardcompute.node.rpc.whereabouts import SLEPT_S, Whereabouts, address_towards

URL = "tcp://10.0.0.1:7420"


class FakeEndpoint:
    def __init__(self) -> None:
        self.moves: list[str] = []
        self.failure: LinkError | None = None

    def move(self, host: str) -> None:
        self.moves.append(host)
        if self.failure is not None:
            raise self.failure


class Machine:
    """A machine whose address and clock are in our hands; None: no network."""

    def __init__(self, *, follows: bool = True) -> None:
        self.endpoint = FakeEndpoint()
        self.address: str | None = "192.168.1.7"
        self.now_s = 1000.0
        self.where = Whereabouts(
            self.endpoint, follows=follows, find_address=self._find, clock=lambda: self.now_s
        )
        self.where.settle(URL)

    def _find(self, url: str) -> str:
        assert url == URL
        if self.address is None:
            raise LinkError("there is no way")
        return self.address


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_machine_that_stays_is_left_alone(machine: Machine) -> None:
    for _ in range(5):
        machine.now_s += 1.0
        assert machine.where.look(URL) == ""
    machine.where.settle(URL)
    assert machine.endpoint.moves == []


def test_another_address_is_a_reason_to_dial_and_is_listened_at(machine: Machine) -> None:
    machine.address = "10.1.1.9"
    assert "address is 10.1.1.9 now" in machine.where.look(URL)
    machine.where.settle(URL)
    assert machine.endpoint.moves == ["10.1.1.9"]
    assert machine.where.look(URL) == ""


def test_between_two_networks_nothing_is_decided(machine: Machine) -> None:
    machine.address = None
    assert machine.where.look(URL) == ""
    machine.where.settle(URL)
    assert machine.endpoint.moves == []
    machine.address = "10.1.1.9"
    machine.where.settle(URL)
    assert machine.endpoint.moves == ["10.1.1.9"]


def test_a_move_that_fails_is_tried_again(machine: Machine) -> None:
    machine.address = "10.1.1.9"
    machine.endpoint.failure = LinkError("no such address yet")
    machine.where.settle(URL)
    machine.endpoint.failure = None
    machine.where.settle(URL)
    assert machine.endpoint.moves == ["10.1.1.9", "10.1.1.9"]


def test_sleep_is_a_reason_to_dial_once(machine: Machine) -> None:
    machine.now_s += SLEPT_S + 20
    assert "slept for 30 s" in machine.where.look(URL)
    machine.now_s += 1.0
    assert machine.where.look(URL) == ""


def test_time_without_a_link_is_no_sleep(machine: Machine) -> None:
    machine.now_s += 3600.0
    machine.where.settle(URL)
    machine.now_s += 1.0
    assert machine.where.look(URL) == ""


def test_a_node_that_was_told_where_to_listen_stays_there() -> None:
    machine = Machine(follows=False)
    machine.address = "10.1.1.9"
    assert machine.where.look(URL) == ""
    machine.where.settle(URL)
    assert machine.endpoint.moves == []
    machine.now_s += SLEPT_S
    assert "slept" in machine.where.look(URL)


def test_the_address_towards_this_machine() -> None:
    assert address_towards("tcp://127.0.0.1:9") == "127.0.0.1"
