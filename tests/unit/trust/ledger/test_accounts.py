"""Accounts of a ledger: what is credited, what is not, and for how long machines were there."""

from __future__ import annotations

import msgspec
import pytest

from shardcompute.trust.ledger import Accounts, Contribution, Entry, LedgerError
from support.ledgers import audit, closed, layout, member, meter, opened, receipts


def accounts_of(*entries: tuple[int, Entry]) -> Accounts:
    accounts = Accounts()
    for number, (at_s, entry) in enumerate(entries):
        accounts.take(msgspec.structs.replace(entry, number=number, at_s=at_s), f"entry {number}")
    return accounts


def by_node(accounts: Accounts, now_s: int | None = None) -> dict[str, Contribution]:
    return {each.node: each for each in accounts.contributions(now_s)}


def test_signed_work_is_credited_until_an_audit_contradicts_it() -> None:
    found = by_node(
        accounts_of(
            (0, opened()),
            (1, member("a")),
            (1, member("b")),
            (5, receipts(a=40, b=40)),
            (9, receipts(a=10, b=10)),
            (10, audit("a", "passed")),
            (11, audit("b", "failed", 40)),
        )
    )
    assert (found["a"].tokens, found["a"].token_layers, found["a"].uncredited_tokens) == (50, 100, 0)
    assert (found["b"].tokens, found["b"].uncredited_tokens) == (10, 40)
    assert (found["a"].audits_passed, found["b"].audits_against) == (1, 1)


def test_no_audit_takes_back_more_than_was_credited() -> None:
    with pytest.raises(LedgerError, match=r"entry 3.withdrawn.b"):
        accounts_of((0, opened()), (1, member("b")), (2, receipts(b=3)), (3, audit("b", "failed", 4)))


def test_uptime_is_counted_while_a_machine_is_a_member() -> None:
    accounts = accounts_of(
        (0, opened()),
        (100, member("a")),
        (100, member("b")),
        (400, member("b", "lost")),
        (500, member("b")),
        (600, member("b", "quarantined")),
    )
    found = by_node(accounts, now_s=1000)
    assert (found["a"].uptime_s, found["b"].uptime_s) == (900, 400)
    assert (found["a"].standing, found["b"].standing) == ("joined", "quarantined")


def test_after_a_crash_uptime_counts_until_the_last_that_was_written() -> None:
    accounts = accounts_of(
        (0, opened()), (100, member("a")), (250, meter(a=1)), (900, opened()), (950, member("a"))
    )
    assert by_node(accounts, now_s=1000)["a"].uptime_s == 150 + 50


def test_after_a_clean_stop_uptime_counts_until_then() -> None:
    accounts = accounts_of((0, opened()), (100, member("a")), (400, closed()))
    assert by_node(accounts, now_s=1000)["a"].uptime_s == 300
    assert by_node(accounts)["a"].standing is None
    with pytest.raises(LedgerError, match="was not opened"):
        accounts.take(msgspec.structs.replace(member("a"), number=3, at_s=500), "entry 3")


def test_epochs_of_a_chain_only_grow_and_layers_have_no_gaps() -> None:
    accounts = accounts_of((0, opened()), (1, layout(3, "a", "b")))
    assert accounts.layouts["chain-1"].epoch == 3
    with pytest.raises(LedgerError, match=r"epochs of a chain only grow"):
        accounts.take(msgspec.structs.replace(layout(2, "a"), number=2, at_s=2), "entry 2")
    gap = layout(4, "a", "b").stages[1:]
    with pytest.raises(LedgerError, match=r"stages\[0\]"):
        accounts.take(msgspec.structs.replace(layout(4, "a"), number=2, at_s=2, stages=gap), "entry 2")
    accounts.take(msgspec.structs.replace(layout(4), number=2, at_s=2), "entry 2")
    assert not accounts.layouts


def test_what_machines_report_adds_up_beside_what_is_credited() -> None:
    found = by_node(
        accounts_of((0, opened()), (1, member("a")), (2, meter(a=5)), (3, meter(a=7, b=1)), (4, meter(b=1)))
    )
    assert (found["a"].steps, found["a"].tokens) == (12, 0)
    assert (found["a"].stored_bytes, found["b"].stored_bytes) == (0, 1 << 20), "stored is as of the last"


def test_cost_is_that_of_the_time_for_the_tokens_that_count() -> None:
    machine = Contribution(node="a", uptime_s=7200, tokens=500_000)
    assert machine.cost_per_million_tokens(0.25) == pytest.approx(1.0)
    assert Contribution(node="b", uptime_s=7200).cost_per_million_tokens(0.25) is None
