"""Machines come and go around the real control code, and clients get every token once."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shardcompute.simulator import Scenario, SimulationOutcome, simulate
from shardcompute.simulator.scenario import FaultKind, PlannedFault
from shardcompute.simulator.sessions import Ledger, SimulatedSession
from support.small_scenario import small

LOAD = "[[load]]\nstreams = 3\nbegins_s = 10\nprompt_tokens = 20\nanswer_tokens = 40\nthink_s = 0.2\n"


def struck(*faults: tuple[float, FaultKind, int], count: int = 5, lasts_s: float = 20.0) -> Scenario:
    scenario = small(count=count, more=LOAD)
    told = tuple(
        PlannedFault(at_s=at_s, kind=kind, stage=stage, lasts_s=lasts_s) for at_s, kind, stage in faults
    )
    return replace(scenario, faults=told)


def check_tokens(outcome: SimulationOutcome) -> None:
    assert outcome.figures["tokens_lost"] == 0
    assert outcome.figures["tokens_doubled"] == 0


def test_the_same_seed_gives_the_same_answer() -> None:
    scenario = small(
        count=6,
        machines="life_s = { exponential = 30 }\ndown_s = { exponential = 5 }\nleaving_share = 0.3",
        more=LOAD,
    )
    first, again = simulate(scenario), simulate(scenario)
    other = simulate(replace(scenario, seed=2))
    assert (first.figures, first.messages, first.moves) == (again.figures, again.messages, again.moves)
    assert first.figures != other.figures
    assert first.figures["machines_failed"]
    check_tokens(first)
    check_tokens(other)


def test_a_killed_stage_is_replaced_by_the_control_code() -> None:
    calm, killed = simulate(struck()), simulate(struck((30.0, "kill", 1)))
    assert calm.decisions.get("ChainReshaped", 0) == 0
    assert killed.decisions["ChainReshaped"] >= 1
    assert any("broke" in reason or "lost" in reason for _, reason in killed.moves)
    assert killed.figures["recovery_longest_s"]
    assert (killed.figures["tokens"] or 0) < (calm.figures["tokens"] or 0)
    check_tokens(killed)


def test_silence_is_found_by_heartbeats_alone() -> None:
    killed, silent = simulate(struck((30.0, "kill", 0))), simulate(struck((30.0, "silence", 0)))
    waited_s = silent.figures["recovery_longest_s"]
    assert waited_s is not None
    assert waited_s > (killed.figures["recovery_longest_s"] or math.inf)
    # A lease of 1.75 s from the last heartbeat, which is at most half a second old.
    assert waited_s >= 1.25
    assert silent.decisions["NodeLost"] == 1
    check_tokens(silent)


def test_a_short_silence_costs_nothing_but_the_wait() -> None:
    outcome = simulate(struck((30.0, "silence", 1), lasts_s=0.8))
    assert "ChainReshaped" not in outcome.decisions
    assert outcome.figures["recovery_longest_s"] == pytest.approx(0.8, abs=0.2)
    check_tokens(outcome)


def test_who_leaves_is_relieved_first() -> None:
    outcome = simulate(struck((30.0, "leave", 1)))
    assert any("relieved" in reason for _, reason in outcome.moves)
    assert outcome.figures["machines_failed"] == 0
    check_tokens(outcome)


def test_owners_take_their_machines_back_by_day() -> None:
    day = "day = { length_s = 40, rests_from = 0.5, rests_to = 0.9, spread = 0.1, grace_s = 2 }"
    outcome = simulate(small(count=6, machines=day, more=LOAD))
    assert outcome.messages["NodeRested"] > 6
    assert 0 < (outcome.figures["served_share"] or 0) < 1
    check_tokens(outcome)


def test_clients_give_up_when_nobody_serves() -> None:
    more = LOAD + "patience_s = 5\n"
    outcome = simulate(small(count=2, more=more))
    assert outcome.figures["served_share"] == 0
    assert outcome.figures["abandoned"]
    assert outcome.figures["tokens"] == 0


def test_machines_that_are_probed_less_know_fewer_links() -> None:
    every, few = small(count=8), small(count=8)
    few = replace(few, network=replace(few.network, probed_peers=2))
    assert simulate(every).figures["links_known"] == 8 * 7 // 2 + 8
    assert (simulate(few).figures["links_known"] or 0) <= 8 * 2 + 8


def test_the_ledger_sees_what_is_lost_and_what_comes_twice() -> None:
    ledger = Ledger()
    session = SimulatedSession(1, 4, 10, 0.0, 60.0, lambda: None)
    assert ledger.deliver(session, 0, 2, 1.0) == 2
    assert ledger.deliver(session, 1, 2, 2.0) == 1
    assert (ledger.doubled, ledger.lost) == (1, 0)
    assert ledger.deliver(session, 5, 1, 3.0) == 3
    assert ledger.lost == 2


FAULTS = st.lists(
    st.tuples(
        st.floats(5.0, 45.0),
        st.sampled_from(["kill", "silence", "leave"]),
        st.integers(0, 2),
        st.floats(0.2, 20.0),
    ),
    max_size=8,
)


@settings(max_examples=25)
@given(FAULTS, st.integers(0, 2**32), st.sampled_from([1, 4]))
def test_no_schedule_of_churn_loses_or_doubles_a_token(
    faults: list[tuple[float, FaultKind, int, float]], seed: int, stride: int
) -> None:
    told = tuple(
        PlannedFault(at_s=at_s, kind=kind, stage=stage, lasts_s=lasts_s)
        for at_s, kind, stage, lasts_s in faults
    )
    more = LOAD.replace("answer_tokens = 40", "answer_tokens = { uniform = [1, 30] }")
    scenario = small(count=random.Random(seed).randint(3, 5), more=more)
    outcome = simulate(replace(scenario, faults=told, seed=seed, stride=stride, duration_s=50.0))
    check_tokens(outcome)
    assert (outcome.figures["finished"] or 0) <= (outcome.figures["requests"] or 0)
