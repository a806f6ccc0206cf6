"""Ranged reads of a local file: exact, counted, and clear about what is missing."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcompute.core.errors import CorruptModelError, SourceError, UnknownModelError
from shardcompute.weights.formats import bytes as bytes_module
from shardcompute.weights.formats.bytes import LocalBytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(range(100)))
    return path


def test_reads_exactly_the_range_and_counts_it(path: Path) -> None:
    with LocalBytes(path) as source:
        assert (source.name, source.size) == (str(path), 100)
        assert bytes(source.read(10, 5)) == bytes(range(10, 15))
        assert bytes(source.read(100, 0)) == b""
        assert bytes(source.read(0, 100)) == bytes(range(100))
        assert source.bytes_read == 105


def test_reads_without_positional_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr("shardcompute.weights.formats.bytes.sys", SimpleNamespace(platform="win32"))
    with LocalBytes(path) as source:
        assert bytes(source.read(90, 10)) == bytes(range(90, 100))
        assert bytes(source.read(3, 2)) == bytes([3, 4])


@pytest.mark.parametrize(("offset", "length"), [(95, 6), (101, 0), (-1, 5), (5, -1), (0, 1 << 60)])
def test_a_range_outside_the_file_is_refused(path: Path, offset: int, length: int) -> None:
    with LocalBytes(path) as source, pytest.raises(CorruptModelError, match="cut short"):
        source.read(offset, length)


def test_a_file_that_shrinks_is_cut_short(path: Path) -> None:
    with LocalBytes(path) as source:
        os.truncate(path, 50)
        with pytest.raises(CorruptModelError, match="cut short"):
            source.read(40, 20)


def test_a_missing_file_and_a_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"no file .*absent"):
        LocalBytes(tmp_path / "absent")
    with pytest.raises(SourceError, match="cannot be opened"):
        LocalBytes(tmp_path)


def test_a_closed_source_reads_no_more(path: Path) -> None:
    source = LocalBytes(path)
    source.close()
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.read(0, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="files have one position there")
def test_a_long_range_is_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytes_module, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    content = bytes(i * 7 % 251 for i in range(10_007))
    path = tmp_path / "long.bin"
    path.write_bytes(content)
    readers: set[str] = set()
    read = LocalBytes._read_piece

    def watched(source: LocalBytes, view: memoryview, offset: int) -> None:
        readers.add(threading.current_thread().name)
        read(source, view, offset)

    monkeypatch.setattr(LocalBytes, "_read_piece", watched)
    with LocalBytes(path) as source:
        assert bytes(source.read(3, 9_999)) == content[3:10_002]
        assert source.bytes_read == 9_999
        assert {name.partition("_")[0] for name in readers} == {"read file"}
        os.truncate(path, 5_000)
        with pytest.raises(CorruptModelError, match="cut short"):
            source.read(0, 10_007)
