"""Training files: what is read, and what is said of lines that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.finetune.data import dataset as dataset_module
from shardcompute.finetune.data.dataset import (
    ChatRecord,
    InstructionRecord,
    PreferenceRecord,
    TextRecord,
    read_dataset,
)

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(
        b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)
    )
    return path


def test_three_forms_are_read_and_blank_lines_skipped(tmp_path: Path) -> None:
    lines = (
        b"\xef\xbb\xbf" + json.dumps(CHAT).encode(),
        b"",
        {"prompt": "p", "completion": "c"},
        {"text": "t"},
    )
    read = read_dataset(write(tmp_path / "data", *lines))
    numbers, records = zip(*read.records, strict=True)
    assert numbers == (1, 3, 4)
    assert [type(each) for each in records] == [ChatRecord, InstructionRecord, TextRecord]
    assert len(read.sha256) == 64


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 2 of .* is not JSON"),
        (b"[1]", "line 2 of .* is no JSON object"),
        ({"content": "x"}, "line 2 of .* none of the keys"),
        ({"prompt": "x"}, "line 2 of .* no text as its completion"),
        ({"text": " "}, "line 2 of .* empty text"),
        ({"text": "\ud800"}, "line 2 of .* half a character"),
        (b'{"text": "\xe9t\xe9"}', "line 2 of .* not UTF-8 at its byte 11"),
        ({"messages": []}, "line 2 of .* no list"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "line 2 of .* role 'bot' in message 1"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 2 of .* no message of the assistant"),
        (
            {"messages": [*CHAT["messages"], {"role": "system", "content": "x"}]},
            "line 2 of .* system message",
        ),
        (
            {"messages": [{"role": "user", "content": 3}, CHAT["messages"][1]]},
            "line 2 of .* no text as its content",
        ),
    ],
)
def test_wrong_lines_are_named(line: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_dataset(write(tmp_path / "data", CHAT, line))


PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}


def test_preferences_are_read(tmp_path: Path) -> None:
    read = read_dataset(write(tmp_path / "data", PAIR, PAIR), has_preferences=True)
    assert [record for _, record in read.records] == [PreferenceRecord("p", "good", "bad")] * 2
    with pytest.raises(UsageError, match=r"line 2 of .* chosen and a rejected .*"):
        read_dataset(write(tmp_path / "data", CHAT, PAIR))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (CHAT, "line 2 of .* no text as its prompt"),
        ({"prompt": "p", "chosen": "good"}, "line 2 of .* no text as its rejected"),
        ({**PAIR, "chosen": ""}, "line 2 of .* empty chosen"),
        ({**PAIR, "rejected": ["bad"]}, "line 2 of .* no text as its rejected"),
        ({**PAIR, "rejected": "good"}, "line 2 of .* same answer twice"),
        (b"nothing", "line 2 of .* is not JSON"),
    ],
)
def test_wrong_preferences_are_named(line: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_dataset(write(tmp_path / "data", PAIR, line), has_preferences=True)


def test_empty_files_and_other_encodings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no examples"):
        read_dataset(write(tmp_path / "empty", b"", b" "))
    with pytest.raises(UsageError, match="is UTF-16"):
        read_dataset(write(tmp_path / "wide", json.dumps(CHAT).encode("utf-16")))
    with pytest.raises(UsageError, match="cannot be read"):
        read_dataset(tmp_path / "missing")


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    read: list[int] = []
    open_path = Path.open

    def watched(self: Path, mode: str) -> Any:
        file = open_path(self, mode)
        plain = file.readline

        class Watched:
            def __enter__(self) -> Watched:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def readline(self, limit: int) -> bytes:
                line: bytes = plain(limit)
                read.append(len(line))
                return line

        return Watched()

    monkeypatch.setattr(Path, "open", watched)
    with pytest.raises(UsageError, match=r"line 1 of .* is longer than 4"):
        read_dataset(path)
    assert sum(read) <= dataset_module.MAX_LINE_BYTES + 1
