"""Phases of a start: kept until there is a log, read back from its lines."""

from __future__ import annotations

import logging

import pytest

from shardcompute.core import phases
from shardcompute.core.phases import Phase, read_phases


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(phases, "_PHASES", phases._PhaseLog())
    monkeypatch.setattr(phases, "_LEAST_S", 0.0)
    caplog.set_level(logging.INFO, logger=phases.__name__)
    return caplog


def test_what_ends_before_there_is_a_log_is_logged_with_it(fresh: pytest.LogCaptureFixture) -> None:
    phases.note_imports()
    with phases.phase("devices"):
        pass
    assert not fresh.messages
    phases.log_phases()
    with phases.phase("weights of layers"):
        pass
    found = read_phases(fresh.messages)
    assert [each.name for each in found] == ["imports", "devices", "weights of layers"]
    assert found[0].seconds > 0
    assert found[0].until_s <= found[1].until_s <= found[2].until_s


def test_a_phase_that_fails_is_a_phase(fresh: pytest.LogCaptureFixture) -> None:
    phases.log_phases()
    with pytest.raises(ZeroDivisionError), phases.phase("loading"):
        raise ZeroDivisionError
    assert [each.name for each in read_phases(fresh.messages)] == ["loading"]


def test_what_takes_no_time_is_not_told(
    fresh: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "_LEAST_S", 60.0)
    phases.log_phases()
    with phases.phase("nothing"):
        pass
    assert not fresh.messages


def test_phases_are_found_among_the_lines_of_a_log() -> None:
    lines = [
        "2026-11-16T08:00:01.000Z INFO shardcompute.core.phases: phase devices: 5.100 s, until 1794816001.000",
        "2026-11-16T08:00:02.000Z INFO shardcompute.node: registered",
        "2026-11-16T08:00:03.000Z INFO shardcompute.core.phases: phase a b: 0.020 s, until 1794816003.500",
    ]
    assert read_phases(lines) == [Phase("devices", 5.1, 1794816001.0), Phase("a b", 0.02, 1794816003.5)]
