"""Recorded states outlive a run that was cut short; what is damaged, foreign, hostile or too much is not believed."""

from __future__ import annotations

import stat
import sys
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from shardcompute.draft_training.dialogue import SelfPlayDialogue
from shardcompute.draft_training.swarm.play import PlayedDialogue
from shardcompute.draft_training.swarm.recording import StateRecording

HIDDEN, VOCABULARY = 8, 50
MADE = np.random.default_rng(1)


def dialogue(tokens: int, kind: str = "question") -> PlayedDialogue:
    ids = MADE.integers(0, VOCABULARY, tokens).astype(np.int32)
    origins = MADE.integers(0, 3, tokens).astype(np.uint8)
    states = MADE.standard_normal((tokens, HIDDEN)).astype(np.float16)
    return PlayedDialogue(SelfPlayDialogue(kind, ids, origins), states)


def recording(
    file: Path,
    *,
    weights: str = "ab",
    hidden: int = HIDDEN,
    vocab_size: int = VOCABULARY,
    most: int = 1 << 20,
) -> StateRecording:
    return StateRecording(file, weights=weights, hidden=hidden, vocab_size=vocab_size, most_bytes=most)


def fill(file: Path, *played: PlayedDialogue) -> None:
    own = recording(file)
    assert list(own.read()) == []
    for each in played:
        own.add(each)


def lengths(own: StateRecording) -> list[int]:
    return [len(each.dialogue.ids) for each in own.read()]


def test_what_was_recorded_comes_back(tmp_path: Path) -> None:
    file, first, second = tmp_path / "new" / "recorded.states", dialogue(20), dialogue(7, "code")
    fill(file, first, second)
    back = list(recording(file).read())
    for played, read in zip((first, second), back, strict=True):
        assert read.dialogue.kind == played.dialogue.kind
        assert np.array_equal(read.dialogue.ids, played.dialogue.ids)
        assert np.array_equal(read.dialogue.origins, played.dialogue.origins)
        assert np.array_equal(read.states, played.states)
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    own = recording(file)
    assert lengths(own) == [20, 7]
    own.add(dialogue(5))
    assert lengths(recording(file)) == [20, 7, 5]
    own.remove()
    assert not file.exists()


def test_it_is_bounded(tmp_path: Path) -> None:
    own = recording(tmp_path / "recorded.states", most=2000)
    assert list(own.read()) == []
    while not own.is_full:
        own.add(dialogue(20))
    own.add(dialogue(1))
    assert (tmp_path / "recorded.states").stat().st_size <= 2000
    assert lengths(recording(tmp_path / "recorded.states")) == [20] * 4


@pytest.mark.parametrize("change", ["cut", "flipped", "long"])
def test_a_damaged_record_ends_the_file(tmp_path: Path, change: str) -> None:
    file = tmp_path / "recorded.states"
    fill(file, dialogue(20))
    good = file.stat().st_size
    own = recording(file)
    assert lengths(own) == [20]
    own.add(dialogue(9))
    content = bytearray(file.read_bytes())
    if change == "cut":
        del content[-3:]
    elif change == "flipped":
        content[-3] ^= 1
    else:
        content[good : good + 4] = b"\xff\xff\xff\x7f"
    file.write_bytes(content)
    again = recording(file)
    assert lengths(again) == [20]
    assert file.stat().st_size == good
    again.add(dialogue(3))
    assert lengths(recording(file)) == [20, 3]


def record(
    kind: str = "question", ids: object = b"\1\0\0\0", origins: object = b"\2", states: object = b"\0" * 16
) -> list[object]:
    return [kind, ids, origins, states]


@pytest.mark.parametrize(
    "hostile",
    [
        record(ids=b"\x32\0\0\0"),
        record(ids=b"\xff\xff\xff\xff"),
        record(ids=b"\1\0\0"),
        record(ids=b"", origins=b"", states=b""),
        record(origins=b"\3"),
        record(origins=b"\2\2"),
        record(states=b"\0" * 15),
        record(states=np.full(HIDDEN, np.nan, np.float16).tobytes()),
        record(states=np.full(HIDDEN, 6e4, np.float16).tobytes()),
        record(kind="k" * 65),
        record(ids=7),
        [],
        {"kind": 1},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_is_refused(tmp_path: Path, hostile: object) -> None:
    file = tmp_path / "recorded.states"
    fill(file, dialogue(4))
    content = msgspec.msgpack.encode(hostile)
    framed = len(content).to_bytes(4, "little") + zlib.crc32(content).to_bytes(4, "little") + content
    with file.open("ab") as opened:
        opened.write(framed)
    assert lengths(recording(file)) == [4]
    plain = msgspec.msgpack.encode(record())
    with file.open("ab") as opened:
        opened.write(len(plain).to_bytes(4, "little") + zlib.crc32(plain).to_bytes(4, "little") + plain)
    assert lengths(recording(file)) == [4, 1], "the same frame is fine with a dialogue in it"


def test_what_is_of_other_weights_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "recorded.states"
    for other in ({"weights": "cd"}, {"hidden": 4}, {"vocab_size": 49}):
        file.unlink(missing_ok=True)
        fill(file, dialogue(4))
        assert lengths(recording(file, **other)) == []  # type: ignore[arg-type]
        assert lengths(recording(file)) == []
    for content in (b"", b"states1\n", b"states0\n" + b"\0" * 40, b"states1\n" + b"\xff" * 4096):
        file.write_bytes(content)
        assert lengths(recording(file)) == []
