"""Several coordinators and one store: one leads, and nothing of a former leader is ever written."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shardcompute.core.errors import NotLeadingError, SourceError, StoreError
from shardcompute.node.coordinator.shared import Leadership, SharedJournal, check_owner
from support.swarm.fake_store import FakeStore, FakeStoreClient

PREFIX = "/shardcompute/home/"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def candidate(store: FakeStore, name: str, client: FakeStoreClient | None = None) -> Leadership:
    return Leadership(client or store.client(), PREFIX, name, clock=store.clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> FakeStore:
    return FakeStore(clock)


def test_one_leads_and_the_other_follows_when_its_lease_is_over(store: FakeStore, clock: Clock) -> None:
    first, second = candidate(store, "first"), candidate(store, "second")
    assert first.try_to_lead()
    assert not second.try_to_lead()
    clock.now_s += 1.5
    first.renew()
    clock.now_s += 1.5
    assert not second.try_to_lead(), "it was renewed in time"
    clock.now_s += 1.0
    assert not first.is_held
    assert second.try_to_lead()
    assert second.epoch == first.epoch + 1
    first.renew()
    assert first.is_deposed


def test_who_resigns_is_followed_at_once(store: FakeStore) -> None:
    first, second = candidate(store, "first"), candidate(store, "second")
    assert first.try_to_lead()
    first.resign()
    assert not first.is_held
    assert second.try_to_lead()


def test_a_leader_stops_before_the_store_lets_another_begin(store: FakeStore, clock: Clock) -> None:
    client = store.client()
    first = candidate(store, "first", client)
    assert first.try_to_lead()
    client.is_cut_off = True
    while first.is_held:
        assert not candidate(store, "second").try_to_lead()
        clock.now_s += 0.01
    with pytest.raises(StoreError):
        first.renew()
    clock.now_s += 1.0
    assert candidate(store, "second").try_to_lead()


def test_a_leader_whose_store_was_away_goes_on_where_nobody_else_has_led(
    store: FakeStore, clock: Clock
) -> None:
    first = candidate(store, "first")
    assert first.try_to_lead()
    journal = SharedJournal(first.store, PREFIX, first)
    store.is_down = True
    clock.now_s += 60.0
    with pytest.raises(StoreError):
        journal.append(b"lost for now")
    assert not journal.may_act
    store.is_down = False
    first.renew()
    assert journal.may_act
    journal.append(b"after all")
    assert list(journal.events()) == [b"after all"]
    assert not candidate(store, "second").try_to_lead()


def test_nothing_of_a_former_leader_is_written(store: FakeStore, clock: Clock) -> None:
    first, second = candidate(store, "first"), candidate(store, "second")
    assert first.try_to_lead()
    former = SharedJournal(first.store, PREFIX, first)
    former.append(b"1", b"2")
    former.write_note("keys", b"old")
    clock.now_s += 5.0
    assert second.try_to_lead()
    newer = SharedJournal(second.store, PREFIX, second)
    assert list(newer.events()) == [b"1", b"2"]
    newer.append(b"3")
    with pytest.raises(NotLeadingError):
        former.append(b"never")
    assert first.is_deposed
    for write in (lambda: former.write_note("keys", b"forged"), lambda: former.compact([b"nothing"])):
        with pytest.raises(NotLeadingError):
            write()
    assert list(newer.events()) == [b"1", b"2", b"3"]
    assert newer.read_note("keys") == b"old"


def test_a_write_whose_answer_was_lost_is_there_once(store: FakeStore) -> None:
    client = store.client()
    leadership = candidate(store, "first", client)
    assert leadership.try_to_lead()
    journal = SharedJournal(client, PREFIX, leadership)
    client.loses_answers = True
    with pytest.raises(StoreError):
        journal.append(b"1", b"2")
    client.loses_answers = False
    journal.append(b"1", b"2", b"3")
    assert list(journal.events()) == [b"1", b"2", b"3"]


def test_an_outcome_replaces_also_what_was_written_without_an_answer(store: FakeStore) -> None:
    client = store.client()
    leadership = candidate(store, "first", client)
    assert leadership.try_to_lead()
    journal = SharedJournal(client, PREFIX, leadership)
    journal.append(b"kept", b"1", b"2")
    client.loses_answers = True
    with pytest.raises(StoreError):
        journal.append(b"3", b"4")
    client.loses_answers = False
    journal.compact([b"all of it"], keeping=[1])
    journal.append(b"5")
    assert list(journal.events()) == [b"kept", b"all of it", b"5"]
    assert list(SharedJournal(client, PREFIX).events()) == [b"kept", b"all of it", b"5"]


def test_much_is_written_in_pieces_and_in_order(store: FakeStore) -> None:
    leadership = candidate(store, "first")
    assert leadership.try_to_lead()
    journal = SharedJournal(leadership.store, PREFIX, leadership)
    events = [b"%d" % number * 50 for number in range(350)]
    journal.append(*events)
    assert list(journal.events()) == events


def test_a_journal_has_one_owner(store: FakeStore) -> None:
    leadership = candidate(store, "first")
    assert leadership.try_to_lead()
    journal = SharedJournal(leadership.store, PREFIX, leadership)
    check_owner(journal, None)
    journal.write_note("cluster", b"ab")
    check_owner(journal, "ab")
    with pytest.raises(SourceError, match="another cluster that is called home"):
        check_owner(journal, "cd")
    with pytest.raises(SourceError, match="whose authority is not on this machine"):
        check_owner(journal, None)


@dataclass
class Member:
    """A coordinator that acts as ours does: only while its lease holds, and after its decision is on record."""

    name: str
    client: FakeStoreClient
    leadership: Leadership
    journal: SharedJournal | None = None
    acted: list[int] = field(default_factory=list)


@pytest.mark.parametrize("seed", range(40))
def test_no_two_leaders_act(seed: int) -> None:
    """Cut off, slow, dead for a while, with clocks that run apart: whoever acts leads alone, and the journal holds what
    each leader wrote in its own epoch, in one piece."""
    rng = random.Random(seed)
    clock = Clock()
    store = FakeStore(clock)
    members = []
    for name in ("a", "b", "c"):
        client = store.client()
        drift = 1 + rng.uniform(-0.02, 0.02)
        own_clock = lambda drift=drift: clock.now_s * drift  # noqa: E731
        members.append(Member(name, client, Leadership(client, PREFIX, name, clock=own_clock)))
    written: list[bytes] = []
    number = 0
    for _ in range(400):
        clock.now_s += rng.choice((0.0, 0.05, 0.3, 0.3, 1.0))
        store.is_down = rng.random() < 0.05
        member = rng.choice(members)
        member.client.is_cut_off = rng.random() < 0.2
        member.client.loses_answers = rng.random() < 0.1
        try:
            if member.journal is None:
                if member.leadership.try_to_lead():
                    member.journal = SharedJournal(member.client, PREFIX, member.leadership)
            elif rng.random() < 0.6:
                member.leadership.renew()
            else:
                number += 1
                event = b"%d %d" % (member.leadership.epoch, number)
                member.journal.append(event)
                written.append(event)
                member.acted.append(number)
        except StoreError:
            pass
        except NotLeadingError:
            assert member.leadership.is_deposed
        if member.leadership.is_deposed:
            member.journal = None
            member.leadership = Leadership(member.client, PREFIX, member.name, clock=member.leadership._clock)
        in_charge = [each for each in members if each.journal is not None and each.journal.may_act]
        assert len(in_charge) <= 1, [each.name for each in in_charge]
    for member in members:
        member.client.is_cut_off = member.client.loses_answers = store.is_down = False
    recorded = list(SharedJournal(store.client(), PREFIX).events())
    epochs = [int(event.split()[0]) for event in recorded]
    assert epochs == sorted(epochs), "a former leader wrote after another had begun"
    assert set(written) <= set(recorded)
    assert written, "nobody ever led"
