"""Who runs from a folder is known exactly: neither a dead process nor a stranger with its id counts."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from shardcompute.core.errors import UsageError
from shardcompute.node.process.pidfile import (
    CLUSTER_FILE,
    Running,
    check_free,
    claim,
    read_running,
    stop_process,
)

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()  # shardcompute"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state file; the tests' own process passes for ours."""
    monkeypatch.setattr("shardcompute.node.process.pidfile._PROGRAM", "")
    return tmp_path / "folder" / CLUSTER_FILE


def test_folder_is_claimed_once(path: Path) -> None:
    check_free(path)
    with claim(path, "home") as held:
        held.update(api_url="http://127.0.0.1:8000")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_running(path) == held.running
        with pytest.raises(UsageError, match=r"already running .*at http://127\.0\.0\.1:8000"), claim(path):
            pass
        with pytest.raises(UsageError):
            check_free(path)
        assert read_running(path) == held.running
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        json.dumps({"pid": 1 << 30, "create_time_s": 1.0, "started_at_s": 1.0}).encode(),
        json.dumps({"pid": os.getpid(), "create_time_s": 1.0, "started_at_s": 1.0}).encode(),
    ],
    ids=["nothing", "cut short", "nobody", "somebody else"],
)
def test_what_a_crash_left_behind_is_no_obstacle(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    assert read_running(path) is None
    with claim(path) as held:
        assert read_running(path) == held.running


def test_another_program_with_our_id_is_not_us(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with claim(path) as held:
        monkeypatch.setattr("shardcompute.node.process.pidfile._PROGRAM", "something else")
        assert held.running.find() is None


def test_claim_of_a_successor_is_left_alone(path: Path) -> None:
    with claim(path) as held:
        other = msgspec.structs.replace(held.running, started_at_s=0.0)
        path.write_bytes(msgspec.json.encode(other))
    assert path.exists()


def _start(code: str) -> tuple[subprocess.Popen[bytes], Running]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process, Running(process.pid, psutil.Process(process.pid).create_time(), 0.0)


def _end(process: subprocess.Popen[bytes]) -> int:
    with process:
        return process.wait()


def test_stopping_asks_first(tmp_path: Path) -> None:
    process, running = _start(SLEEPER)
    assert stop_process(running, tmp_path, grace_s=30.0) == []
    assert _end(process) == -15
    assert stop_process(running, tmp_path, grace_s=30.0) == []


def test_stopping_uses_force_at_last(tmp_path: Path) -> None:
    process, running = _start(f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEPER}")
    assert stop_process(running, tmp_path, grace_s=0.0) == [process.pid]
    assert _end(process) == -9


def test_strangers_are_never_stopped(tmp_path: Path) -> None:
    process, running = _start(SLEEPER)
    stranger = msgspec.structs.replace(running, create_time_s=running.create_time_s - 100)
    assert stop_process(stranger, tmp_path, grace_s=0.0) == []
    assert process.poll() is None
    process.kill()
    _end(process)
