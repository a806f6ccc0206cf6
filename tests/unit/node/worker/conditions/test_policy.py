"""When a worker may work: what counts at once, what must last, and what nobody says."""

from __future__ import annotations

from shardcompute.node.worker.conditions.policy import (
    BUSY_AFTER_S,
    CALM_S,
    IDLE_AFTER_S,
    Reading,
    WorkConditions,
    WorkJudgement,
    unsaid,
)

ALL = WorkConditions(only_when_idle=True, only_on_mains=True, not_metered=True)
FINE = Reading(is_on_mains=True, is_metered=False, idle_s=IDLE_AFTER_S, others_load=0.0)
BATTERY = Reading(is_on_mains=False, is_metered=False, idle_s=1e6, others_load=0.0)
BUSY = Reading(is_on_mains=True, is_metered=False, idle_s=1e6, others_load=0.9)


def test_a_battery_a_metered_link_and_a_person_count_at_once() -> None:
    for reading, word in (
        (BATTERY, "battery"),
        (Reading(is_metered=True), "metered"),
        (Reading(idle_s=IDLE_AFTER_S - 1), "using this machine"),
    ):
        assert word in WorkJudgement().after(ALL, reading, 0.0).reason


def test_what_was_not_asked_for_keeps_nobody_from_working() -> None:
    everything = Reading(is_on_mains=False, is_metered=True, idle_s=0.0, others_load=1.0)
    judged = WorkJudgement().after(WorkConditions(), everything, 0.0)
    assert judged.after(WorkConditions(), everything, 1e6).reason == ""


def test_what_the_system_does_not_say_keeps_nobody_from_working() -> None:
    assert WorkJudgement().after(ALL, Reading(), 0.0).reason == ""


def test_a_worker_works_again_once_all_has_been_well_for_a_while() -> None:
    judged = WorkJudgement().after(ALL, BATTERY, 0.0)
    judged = judged.after(ALL, FINE, 10.0)
    assert judged.reason
    judged = judged.after(ALL, BATTERY, 20.0).after(ALL, FINE, 21.0).after(ALL, FINE, 20.0 + CALM_S)
    assert judged.reason
    assert judged.after(ALL, FINE, 21.0 + CALM_S).reason == ""


def test_a_moment_of_load_disturbs_nobody_who_works() -> None:
    judged = WorkJudgement().after(ALL, BUSY, 0.0).after(ALL, BUSY, BUSY_AFTER_S - 1)
    assert judged.reason == ""
    judged = judged.after(ALL, FINE, BUSY_AFTER_S).after(ALL, BUSY, BUSY_AFTER_S + 1)
    assert judged.reason == ""
    assert "other programs" in judged.after(ALL, BUSY, 2 * BUSY_AFTER_S + 1).reason


def test_a_worker_that_rests_goes_on_resting_while_others_are_busy() -> None:
    judged = WorkJudgement().after(ALL, BATTERY, 0.0).after(ALL, BUSY, 1.0)
    assert "other programs" in judged.reason


def test_options_that_can_have_no_effect_are_named() -> None:
    assert [line.split()[0] for line in unsaid(ALL, Reading())] == [
        "--only-on-mains",
        "--not-metered",
        "--only-when-idle",
    ]
    assert unsaid(ALL, FINE) == []
    assert unsaid(WorkConditions(), Reading()) == []
