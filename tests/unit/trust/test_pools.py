"""Open pools: what findings make of strangers, and who is at fault where they contradict others."""

from __future__ import annotations

from shardcompute.trust.judgement import contradiction, judge
from shardcompute.trust.pools import (
    PoolMember,
    PoolPolicy,
    after_finding,
    standing_in_words,
    suspends,
    weigh,
    why_refused,
)

POLICY = PoolPolicy()
NEWCOMER = PoolMember("192.0.2.0/24", 0.0)
DAY_S = 86_400.0


def test_promotion_takes_windows_and_a_day() -> None:
    busy = after_finding(NEWCOMER, POLICY, "passed", 10_000, "", DAY_S / 2)
    assert busy.standing == "probation", "whoever asks for its own work gains no time"
    assert after_finding(busy, POLICY, "passed", 1, "", DAY_S).standing == "promoted"
    assert after_finding(NEWCOMER, POLICY, "passed", 255, "", 9 * DAY_S).standing == "probation"
    assert standing_in_words(NEWCOMER, POLICY) == "on probation: 0 of 256 audited windows passed"


def test_a_record_ends_where_rows_are_not_shown_and_everything_by_proof() -> None:
    promoted = PoolMember("n", 0.0, "promoted", 300)
    silent = after_finding(promoted, POLICY, "withheld", 4, "it does not show", 5.0)
    assert (silent.standing, silent.windows) == ("probation", 0)
    assert suspends(promoted, "withheld")
    assert not suspends(promoted, "passed")
    assert not suspends(None, "failed")
    proven = after_finding(promoted, POLICY, "failed", 4, "other rows", 5.0)
    assert proven.standing == "expelled"
    for finding in ("passed", "withheld", "disputed", "failed"):
        assert after_finding(proven, POLICY, finding, 1000, "", 99 * DAY_S).standing == "expelled"


def test_places_of_those_who_left_or_were_expelled_come_free_in_time() -> None:
    gone = {f"{at}": NEWCOMER for at in range(2)}
    assert "this network" in why_refused(gone, POLICY, "new", NEWCOMER.network, 6 * DAY_S)
    assert why_refused(gone, POLICY, "new", NEWCOMER.network, 8 * DAY_S) == ""
    assert "this network" in why_refused(gone, POLICY, "new", NEWCOMER.network, 8 * DAY_S, present=gone)
    expelled = {"0": after_finding(NEWCOMER, POLICY, "failed", 1, "why", DAY_S), "1": NEWCOMER}
    assert "this network" in why_refused(expelled, POLICY, "new", NEWCOMER.network, 20 * DAY_S, present=["1"])
    assert why_refused(expelled, POLICY, "new", NEWCOMER.network, 32 * DAY_S, present=["1"]) == ""


def test_strangers_cannot_cost_a_good_machine_its_name() -> None:
    pool = {"stranger": NEWCOMER, "promoted": PoolMember("n", 0.0, "promoted")}
    disputed = weigh(judge("stranger", "good", "far"), pool)
    assert [(each.node, each.finding) for each in disputed.blames] == [("stranger", "failed")]
    assert disputed.outcome == "failed"
    [blame] = weigh(contradiction("good", "stranger", "other rows"), pool).blames
    assert blame.node == "stranger"
    between = contradiction("good", "promoted", "other rows")
    assert weigh(between, pool) == between
    both = contradiction("stranger", "another", "other rows")
    assert weigh(both, {**pool, "another": NEWCOMER}) == both
