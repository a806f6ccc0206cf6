"""Files appear whole or not at all, and a full disk is told apart from other trouble."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
from collections import namedtuple
from io import FileIO
from pathlib import Path

import pytest

from shardcompute.core.errors import CorruptModelError, DiskFullError, SourceError
from shardcompute.weights.sources import disk
from shardcompute.weights.sources.disk import (
    PartialFile,
    check_room,
    disk_errors,
    format_bytes,
    hash_file,
    hold_lock,
)

CONTENT = b"0123456789"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
Usage = namedtuple("Usage", "total used free")


class FullDisk(FileIO):
    """Takes four bytes, then has no room."""

    def write(self, chunk: bytes) -> int:  # type: ignore[override]
        if self.tell() >= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(chunk)[:4])


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 98_362_432, 5 << 30, 3 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "93.8 MiB",
        "5.0 GiB",
        "3.0 TiB",
    ]


def test_whole_file_takes_its_name(tmp_path: Path) -> None:
    with PartialFile(tmp_path / "sub" / "file", 10, SHA256) as partial:
        partial.restart(SHA256)
        partial.write(CONTENT[:3])
        assert not partial.destination.exists()
        partial.write(CONTENT[3:])
        assert partial.finish() == SHA256
    assert hash_file(tmp_path / "sub" / "file") == SHA256
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["file"]


def test_second_attempt_continues_the_first(tmp_path: Path) -> None:
    with PartialFile(tmp_path / "file", 10, SHA256) as partial:
        partial.restart("one")
        partial.write(CONTENT[:7])
    with PartialFile(tmp_path / "file", 10, SHA256) as partial:
        assert (partial.size, partial.identity) == (7, "one")
        partial.write(CONTENT[7:])
        assert partial.finish() == SHA256
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("written", [b"0123456", b"012345678X"])
def test_damaged_file_is_deleted(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "file.partial").write_bytes(written)
    with pytest.raises(CorruptModelError), PartialFile(tmp_path / "file", 10, SHA256) as partial:
        partial.finish()
    assert list(tmp_path.iterdir()) == []


def test_more_than_announced_never_reaches_the_disk(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="longer"), PartialFile(tmp_path / "file", 4) as partial:
        partial.write(CONTENT)
    assert list(tmp_path.iterdir()) == []


def test_too_long_leftover_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(CONTENT)
    with PartialFile(tmp_path / "file", 4) as partial:
        assert partial.size == 0
        partial.write(b"abcd")
        partial.finish()
    assert (tmp_path / "file").read_bytes() == b"abcd"


def test_full_disk_deletes_the_part_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_open_append", lambda path: FullDisk(path, "ab"))
    with pytest.raises(DiskFullError, match="6 bytes more"), PartialFile(tmp_path / "file", 10) as partial:
        partial.write(CONTENT)
    assert list(tmp_path.iterdir()) == []


def test_quota_is_a_full_disk_and_permissions_are_not(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="quota"), disk_errors(tmp_path / "x", lambda: 1):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    with pytest.raises(SourceError, match="Permission denied") as caught, disk_errors(tmp_path / "x"):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert not isinstance(caught.value, DiskFullError)


def test_room_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 30))
    check_room(tmp_path, 512 << 20, "a model")
    with pytest.raises(DiskFullError, match=r"a model needs 2\.0 GiB") as caught:
        check_room(tmp_path, 2 << 30, "a model")
    assert "1.1 GiB more" in caught.value.hint


HOLDER = """
import sys
from pathlib import Path
from shardcompute.weights.sources.disk import hold_lock
with hold_lock(Path(sys.argv[1]), lambda: None):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_is_held_against_another_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            waits: list[str] = []

            def on_wait() -> None:
                waits.append("waiting")
                other.stdin.close()

            with hold_lock(tmp_path / "lock", on_wait):
                assert waits == ["waiting"]
        finally:
            other.stdin.close()
    with hold_lock(tmp_path / "lock", lambda: pytest.fail("nobody holds it")):
        pass
