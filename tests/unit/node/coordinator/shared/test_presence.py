"""Which coordinators there are: who leads, who waits, who is away, and what the store need not be believed."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import StoreError
from shardcompute.node.coordinator.shared import (
    Candidate,
    KnownCoordinator,
    Leadership,
    WaitingPlace,
    read_coordinators,
    read_leader,
    register_candidate,
)
from shardcompute.node.coordinator.shared.key_value import Put
from shardcompute.node.coordinator.shared.presence import WAITING_TTL_S
from support.swarm.fake_store import FakeStore

PREFIX = "/shardcompute/home/"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def candidate(node: str, port: int) -> Candidate:
    return Candidate(node, f"tcp://10.0.0.1:{port}", f"10.0.0.1:{port + 1}", f"http://10.0.0.1:{port + 2}")


def test_who_leads_waits_and_is_away() -> None:
    clock = Clock()
    store = FakeStore(clock)
    client = store.client()
    for number, node in enumerate("abcd"):
        register_candidate(client, PREFIX, candidate(node, 10 * number))
    # Started again with another key, at the same address.
    register_candidate(client, PREFIX, candidate("0-former-b", 10))
    assert read_leader(client, PREFIX) is None
    leadership = Leadership(client, PREFIX, "b", clock=clock, wall_clock=lambda: 5_000.0)
    assert leadership.try_to_lead()
    late = WaitingPlace(client, PREFIX, "a", clock=clock, wall_clock=lambda: 7_000.0)
    early = WaitingPlace(client, PREFIX, "d", clock=clock, wall_clock=lambda: 6_000.0)
    late.show()
    early.show()
    leads = KnownCoordinator("b", "http://10.0.0.1:12", "leads", 5_000.0)
    assert read_leader(client, PREFIX) == leads
    assert read_coordinators(client, PREFIX) == (
        leads,
        KnownCoordinator("d", "http://10.0.0.1:32", "waits", 6_000.0),
        KnownCoordinator("a", "http://10.0.0.1:2", "waits", 7_000.0),
        KnownCoordinator("c", "http://10.0.0.1:22", "away"),
    )
    early.leave()
    for _ in range(10):
        clock.now_s += WAITING_TTL_S / 2
        late.show()
    first, *others = read_coordinators(client, PREFIX)
    assert (first.node, first.status) == ("a", "waits"), "nobody renewed b's lease"
    assert [each.status for each in others] == ["away"] * 3
    clock.now_s += WAITING_TTL_S
    assert {each.status for each in read_coordinators(client, PREFIX)} == {"away"}
    late.show()
    assert read_coordinators(client, PREFIX)[0].since_s == 7_000.0, "it has waited all the time"


def test_a_leader_that_leads_again_has_led_all_the_time() -> None:
    clock = Clock()
    client = FakeStore(clock).client()
    register_candidate(client, PREFIX, candidate("a", 0))
    wall_s = iter([5_000.0, 5_001.0, 9_000.0])
    leadership = Leadership(client, PREFIX, "a", clock=clock, wall_clock=lambda: next(wall_s))
    assert leadership.try_to_lead()
    began = read_leader(client, PREFIX)
    clock.now_s += 60.0
    leadership.renew()
    assert read_leader(client, PREFIX) == began


def test_what_is_damaged_in_the_store_is_nobody() -> None:
    client = FakeStore().client()
    register_candidate(client, PREFIX, candidate("a", 0))
    damaged = b"[" * 100_000
    names = ("coordinators/x", "waiting/a", "leader")
    client.write([], [Put(f"{PREFIX}{name}", damaged) for name in names])
    assert [(each.node, each.status) for each in read_coordinators(client, PREFIX)] == [("a", "away")]


def test_a_store_that_is_away_is_said() -> None:
    store = FakeStore()
    store.is_down = True
    place = WaitingPlace(store.client(), PREFIX, "a")
    with pytest.raises(StoreError):
        place.show()
    with pytest.raises(StoreError):
        read_coordinators(store.client(), PREFIX)
    place.leave()
