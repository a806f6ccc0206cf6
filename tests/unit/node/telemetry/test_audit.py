"""The audit log: whole after restarts and rotations, and found out when somebody has changed it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from shardcompute.node.telemetry.audit import AUDIT_FILE, HEAD_FILE, AuditLimits, AuditLog


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def fill(folder: Path, count: int = 5) -> AuditLog:
    log = AuditLog(folder)
    for number in range(count):
        log.append("local", "key.create", f"key-{number}", detail={"role": "use"})
    return log


def test_entries_are_kept_in_order_over_restarts(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    again = AuditLog(tmp_path)
    again.append("sk-sc-abcdefgh", "key.revoke", "key-1", result="refused: no such key")
    page = again.page()
    assert (page.checked, page.problem) == (4, "")
    assert [entry.number for entry in page.data] == [4, 3, 2, 1]
    assert (page.data[0].who, page.data[0].result) == ("sk-sc-abcdefgh", "refused: no such key")
    assert page.data[0].previous == page.data[1].hash
    for name in (AUDIT_FILE, HEAD_FILE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_pages_follow_each_other(tmp_path: Path) -> None:
    log = fill(tmp_path)
    first = log.page(limit=2)
    assert first.next is not None
    second = log.page(before=first.next, limit=10)
    assert [entry.number for entry in (*first.data, *second.data)] == [5, 4, 3, 2, 1]
    assert second.next is None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b"key-2", b"key-9"), *lines[3:]], "entry 3 was changed"),
        (lambda lines: [*lines[:2], *lines[3:]], "between 2 and 4"),
        (lambda lines: lines[:3], "after 3 are missing: the last was 5"),
        (lambda lines: lines[2:], "before 3 are missing"),
        (lambda lines: [*lines[:2], b"junk", *lines[3:]], "between 2 and 4"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "missing or were changed"),
        (lambda lines: [], "all entries are missing"),
    ],
)
def test_what_was_changed_is_found(tmp_path: Path, spoil: object, said: str) -> None:
    fill(tmp_path)
    path = tmp_path / AUDIT_FILE
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in spoil(lines)))  # type: ignore[operator]
    log = AuditLog(tmp_path)
    assert said in log.page().problem
    log.append("local", "cluster.start")
    assert log.page().problem, "going on does not hide it"


def test_old_files_go_and_the_rest_is_whole(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, AuditLimits(file_bytes=1000, files=3))
    for number in range(40):
        log.append("local", "token.create", f"token-{number}")
    page = log.page(limit=1000)
    assert page.problem == ""
    assert page.data[0].number == 40
    assert 1 < page.data[-1].number < 40
    assert len(list(tmp_path.glob("audit*.jsonl"))) == 3


def test_a_disk_that_refuses_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = fill(tmp_path, 1)
    path = tmp_path / AUDIT_FILE
    content = path.read_bytes()
    path.unlink()
    path.mkdir()
    log.append("local", "node.revoke", "n-1")
    assert "cannot be written" in caplog.text
    path.rmdir()
    path.write_bytes(content)
    path.chmod(0o600)
    log.append("local", "node.revoke", "n-2")
    page = log.page()
    assert ([entry.target for entry in page.data], page.problem) == (["n-2", "n-1", "key-0"], "")


def test_nothing_secret_and_nothing_without_end(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    secret = "sk-sc-" + "a1B2" * 10
    log.append("local", "key.create", secret, detail={"token": f"Bearer {secret}", "long": "x" * 9999})
    content = (tmp_path / AUDIT_FILE).read_text()
    assert secret not in content
    assert len(content) < 2000


def test_refusals_are_bounded_and_counted(tmp_path: Path) -> None:
    clock = Clock()
    log = AuditLog(tmp_path, wall_clock=clock)
    for _ in range(100):
        log.append("sk-sc-abcdefgh", "key.create", result="refused: not yours")
    assert len(log.page(limit=1000).data) == 60
    log.append("local", "key.create", "k")
    assert log.page().data[0].detail == {"refusals_not_listed": "40"}
    clock.now_s += 61.0
    log.append("sk-sc-abcdefgh", "key.create", result="refused: not yours")
    assert log.page(limit=1000).checked == 62
