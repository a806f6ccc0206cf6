"""One ledger for all servers: nothing is spent twice, counted twice or forgotten for longer than a lease."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from shardcompute.core.errors import SourceError
from shardcompute.node.telemetry.quota import DAY_S, LEASE_S, QuotaDraw, QuotaLedger
from shardcompute.security.api_keys import KeyLimits

KEY = "sk-sc-aaaaaaaa"
HUNDRED = KeyLimits(tokens_per_day=100)


@dataclass
class Clock:
    now_s: float = 20_000 * DAY_S + 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Notes:
    kept: dict[str, bytes] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    opened: int = 0

    def open(self) -> QuotaLedger:
        """As a process does that was started anew."""
        self.opened += 1
        return QuotaLedger(
            own=f"own-{self.opened}",
            read=self.kept.get,
            write=self.kept.__setitem__,
            clock=self.clock,
            wall_clock=self.clock,
        )


def at(spent: int, held: int, *, version: int, tokens: int = 0, requests: int = 0) -> QuotaDraw:
    return QuotaDraw(KEY, 20_000, version, spent, held, tokens, requests)


def test_two_servers_cannot_have_more_than_one() -> None:
    ledger = Notes().open()
    assert ledger.draw_for("a", at(0, 0, version=1, tokens=70), HUNDRED).tokens == 70
    second = ledger.draw_for("b", at(0, 0, version=1, tokens=70), HUNDRED)
    assert (second.tokens, second.spent, second.held) == (30, 0, 100)
    # The first spends 10 and gives the rest back: that is what the second can have.
    ledger.draw_for("a", at(10, 0, version=2), HUNDRED)
    third = ledger.draw_for("b", at(30, 0, version=2, tokens=100), HUNDRED)
    assert (third.tokens, third.spent) == (60, 40)


def test_what_is_told_twice_or_late_counts_once() -> None:
    ledger = Notes().open()
    ledger.draw_for("a", at(0, 0, version=1, tokens=50), HUNDRED)
    for _ in range(3):
        ledger.draw_for("a", at(20, 30, version=3), HUNDRED)
    ledger.draw_for("a", at(5, 45, version=2), HUNDRED)
    told = ledger.draw_for("b", at(0, 0, version=1), HUNDRED)
    assert (told.spent, told.held) == (20, 30)


def test_a_server_that_is_lost_costs_what_it_told() -> None:
    notes = Notes()
    ledger = notes.open()
    ledger.draw_for("a", at(0, 0, version=1, tokens=90), HUNDRED)
    ledger.draw_for("a", at(20, 70, version=2), HUNDRED)
    notes.clock.now_s += LEASE_S - 1
    assert ledger.draw_for("b", at(0, 0, version=1, tokens=80), HUNDRED).tokens == 10
    notes.clock.now_s += 2
    assert ledger.draw_for("b", at(0, 10, version=2, tokens=80), HUNDRED).tokens == 70


def test_this_process_is_never_given_up() -> None:
    notes = Notes()
    ledger = notes.open()
    ledger.draw(at(0, 0, version=1, tokens=90), HUNDRED)
    notes.clock.now_s += 10 * LEASE_S
    assert ledger.draw_for("b", at(0, 0, version=1, tokens=80), HUNDRED).tokens == 10


def test_a_restart_forgives_nothing_that_was_told() -> None:
    notes = Notes()
    first = notes.open()
    first.draw_for("a", at(0, 0, version=1, tokens=40), HUNDRED)
    first.draw(at(0, 0, version=1, tokens=40), HUNDRED)
    first.settle(at(25, 15, version=2))
    killed = notes.open()
    told = killed.draw_for("b", at(0, 0, version=1), HUNDRED)
    assert (told.spent, told.held) == (0, 80), "what was granted was on record before it was used"
    first.flush()
    second = notes.open()
    assert second.draw_for("a", at(40, 0, version=5), HUNDRED).spent == 65
    notes.clock.now_s += LEASE_S + 1
    assert second.draw_for("b", at(0, 0, version=1, tokens=100), HUNDRED).tokens == 35


def test_a_ledger_that_forgot_learns_again() -> None:
    ledger = Notes().open()
    ledger.draw_for("a", at(60, 20, version=9), HUNDRED)
    assert ledger.draw_for("b", at(0, 0, version=1, tokens=50), HUNDRED).tokens == 20


def test_a_day_ends_for_all() -> None:
    notes = Notes()
    ledger = notes.open()
    ledger.draw_for("a", at(0, 0, version=1, tokens=100), HUNDRED)
    notes.clock.now_s += DAY_S
    late = ledger.draw_for("a", at(60, 40, version=2, tokens=50), HUNDRED)
    assert (late.day, late.tokens, late.spent) == (20_001, 50, 0), "yesterday's position is yesterday's"
    assert (
        notes.open().draw_for("b", replace(at(0, 0, version=1, tokens=99), day=20_001), HUNDRED).tokens == 50
    )


def test_requests_of_all_servers_share_a_minute() -> None:
    notes = Notes()
    ledger = notes.open()
    three = KeyLimits(requests_per_minute=3)
    lot = replace(at(0, 0, version=1, requests=2), valid_s=10.0)
    assert ledger.draw_for("a", lot, three).requests == 2
    assert ledger.draw_for("b", lot, three).requests == 1
    refused = ledger.draw(at(0, 0, version=1, requests=1), three)
    assert (refused.requests, refused.wait_s) == (0, pytest.approx(70.0))
    notes.clock.now_s += 69.0
    assert ledger.draw(at(0, 0, version=1, requests=1), three).requests == 0
    notes.clock.now_s += 1.0
    assert ledger.draw(at(0, 0, version=1, requests=1), three).requests == 1


def test_a_minute_goes_on_after_a_restart() -> None:
    notes = Notes()
    three, one = KeyLimits(requests_per_minute=3), at(0, 0, version=1, requests=1)
    first = notes.open()
    assert first.draw(replace(one, requests=2), three).requests == 2
    notes.clock.now_s += 30.5
    assert first.draw(one, three).requests == 1
    first.flush()
    second = notes.open()
    refused = second.draw_for("b", one, three)
    assert (refused.requests, refused.wait_s) == (0, pytest.approx(29.5, abs=1.0))
    notes.clock.now_s += 31.0
    assert [second.draw(one, three).requests for _ in range(3)] == [1, 1, 0], "the first two are over"
    second.flush()
    notes.clock.now_s += 200.0
    assert notes.open().draw(replace(one, requests=3), three).requests == 3, "a minute, and not for ever"


def test_no_clock_makes_a_minute_last() -> None:
    """Another coordinator's clock may be wrong, or this one's set back."""
    notes = Notes()
    one, lot = KeyLimits(requests_per_minute=1), at(0, 0, version=1, requests=1)
    ahead = Notes(notes.kept, Clock(notes.clock.now_s + 1000 * DAY_S))
    ledger = ahead.open()
    ledger.draw(lot, one)
    ledger.flush()
    here = notes.open()
    assert here.draw(lot, one).wait_s <= 120.0
    notes.clock.now_s += 121.0
    assert here.draw(lot, one).requests == 1


def test_what_is_written_of_a_minute_is_short() -> None:
    notes = Notes()
    ledger = notes.open()
    for _ in range(5000):
        ledger.draw(at(0, 0, version=1, requests=1), KeyLimits(requests_per_minute=100_000))
        notes.clock.now_s += 0.01
    ledger.flush()
    (content,) = notes.kept.values()
    assert len(content) < 2000


def test_a_damaged_note_is_no_empty_one() -> None:
    notes = Notes()
    notes.open().draw_for("a", at(0, 0, version=1, tokens=40), HUNDRED)
    (name,) = notes.kept
    notes.kept[name] = b"\xff"
    with pytest.raises(SourceError, match="damaged"):
        notes.open()


@dataclass
class Server:
    """Does what a meter does, and dies at times."""

    name: str
    version: int = 0
    spent: int = 0
    held: int = 0

    def position(self, tokens: int = 0) -> QuotaDraw:
        self.version += 1
        return at(self.spent, self.held, version=self.version, tokens=tokens)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_a_limit_holds(seed: int) -> None:
    """As long as no server dies with more spent than it told, all together never spend more than the limit."""
    chance, notes, limit = random.Random(seed), Notes(), KeyLimits(tokens_per_day=500)
    ledger, servers, total = notes.open(), [Server(f"s{n}") for n in range(3)], 0
    for number in range(400):
        server = chance.choice(servers)
        act = chance.random()
        if act < 0.4:
            server.held += ledger.draw_for(server.name, server.position(chance.randint(1, 40)), limit).tokens
        elif act < 0.8:
            used = min(server.held, chance.randint(0, 20))
            server.spent, server.held, total = server.spent + used, server.held - used, total + used
            if chance.random() < 0.7:
                ledger.draw_for(server.name, server.position(), limit)
        elif act < 0.9:
            ledger = notes.open()  # the coordinator was killed
        else:
            told = ledger.draw_for(server.name, server.position(), limit)
            assert told.spent + told.held <= 500
            servers[servers.index(server)] = Server(f"n{number}")
            notes.clock.now_s += chance.choice([0.0, LEASE_S / 4])
            for other in servers:
                ledger.draw_for(other.name, other.position(), limit)
        assert total <= 500
    assert total > 100
