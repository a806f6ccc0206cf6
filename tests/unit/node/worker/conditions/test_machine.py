"""What the system says of power, people and links, from faked files and commands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shardcompute.node.worker.conditions.machine import (
    OthersLoad,
    idle_s,
    is_metered,
    is_on_mains,
    run_command,
)


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, content in files.items():
        (folder / name / file).write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Charging"}}, True),
        (
            {"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Discharging"}},
            False,
        ),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, True),
        (
            {"ucsi": {"type": "USB", "online": "1"}, "BAT0": {"type": "Battery", "status": "Discharging"}},
            True,
        ),
        ({"mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Unknown"}, "AC": {"type": "Mains", "online": "0"}}, True),
    ],
)
def test_mains_on_linux(tmp_path: Path, supplies: Mapping[str, Mapping[str, str]], expected: bool) -> None:
    for name, files in supplies.items():
        supply(tmp_path, name, **files)
    assert is_on_mains(tmp_path, "linux") is expected


def test_a_container_that_sees_no_supplies_does_not_say(tmp_path: Path) -> None:
    assert is_on_mains(tmp_path / "none", "linux") is None


def answering(answers: Mapping[str, str]) -> object:
    def run(command: Sequence[str]) -> str | None:
        return answers.get(command[0])

    return run


@pytest.mark.parametrize(
    ("said", "expected"),
    [("u 1", True), ("u 3", True), ("u 2", False), ("u 4", False), ("u 0", None), ("", None), ("s x", None)],
)
def test_metered_links_on_linux(said: str, expected: bool | None) -> None:
    assert is_metered(answering({"busctl": f"{said}\n"}), "linux") is expected  # type: ignore[arg-type]


def test_metered_links_elsewhere() -> None:
    assert is_metered(answering({"powershell": "Fixed\r\n"}), "win32") is True  # type: ignore[arg-type]
    assert is_metered(answering({"powershell": "Unrestricted\r\n"}), "win32") is False  # type: ignore[arg-type]
    assert is_metered(answering({}), "win32") is None  # type: ignore[arg-type]
    assert is_metered(answering({}), "darwin") is None  # type: ignore[arg-type]


def test_people_at_a_desktop_on_linux(tmp_path: Path) -> None:
    def look(said: str) -> float | None:
        return idle_s(answering({"loginctl": said}), tmp_path, "linux", lambda: 1000.0)  # type: ignore[arg-type]

    assert look("IdleHint=yes\nIdleSinceHint=400000000\n") == 600.0
    assert look("IdleHint=no\nIdleSinceHint=400000000\n") == 0.0
    assert look("IdleHint=no\nIdleSinceHint=0\n") is None
    assert look("") is None


def test_people_at_terminals_on_linux(tmp_path: Path) -> None:
    (tmp_path / "pts").mkdir()
    for name, at_s in (("pts/0", 300.0), ("pts/1", 900.0), ("pts/ptmx", 999.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at_s, at_s))
    silent = answering({})
    assert idle_s(silent, tmp_path, "linux", lambda: 1000.0) == 100.0  # type: ignore[arg-type]
    recent = answering({"loginctl": "IdleHint=yes\nIdleSinceHint=990000000\n"})
    assert idle_s(recent, tmp_path, "linux", lambda: 1000.0) == 10.0  # type: ignore[arg-type]


def test_people_on_a_mac(tmp_path: Path) -> None:
    said = '  | |   "HIDIdleTime" = 12500000000\n'
    assert idle_s(answering({"ioreg": said}), tmp_path, "darwin") == 12.5  # type: ignore[arg-type]
    assert idle_s(answering({}), tmp_path, "darwin") is None  # type: ignore[arg-type]


def test_commands_that_are_not_there_or_fail() -> None:
    assert run_command(["shardcompute-no-such-command"]) is None
    assert run_command(["false"]) is None


def test_the_load_of_others_leaves_our_own_out() -> None:
    busy, now = [(100.0, 40.0)], [0.0]
    load = OthersLoad(lambda: busy[0], lambda: now[0], count=4)
    assert load.look() is None
    busy[0], now[0] = (130.0, 60.0), 10.0
    assert load.look() == pytest.approx((30 - 20) / 10 / 4)
    busy[0], now[0] = (140.0, 100.0), 20.0
    assert load.look() == 0.0


def test_this_machine_can_be_looked_at() -> None:
    load = OthersLoad()
    load.look()
    assert load.look() is None or 0.0 <= (load.look() or 0.0) <= 1.0
    is_on_mains()
    idle_s()
