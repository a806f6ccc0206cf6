"""Split GGUF: parts read as one file, and whatever parts say wrongly of each other is found."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from shardcompute.core.errors import CorruptModelError, ShardComputeError
from shardcompute.weights.formats.bytes import ByteSource, LocalBytes
from shardcompute.weights.formats.gguf_file import open_gguf
from shardcompute.weights.formats.gguf_parts import GgufParts, open_gguf_files, parse_part_name, parts_with
from shardcompute.weights.formats.gguf_writer import GgufTensor, stored_text, write_gguf
from shardcompute.weights.formats.tensor_file import read_matrix
from support.gguf.parts import split_gguf, split_keys

RANDOM = np.random.default_rng(0)
TENSORS = {f"t{index}": RANDOM.standard_normal((4, 32)).astype(np.float32) for index in range(7)}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_token_list(["a", "ä", ""])
    for name, values in TENSORS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Opener:
    """Opens files by path and remembers what was read of each."""

    def __init__(self) -> None:
        self.opened: dict[str, LocalBytes] = {}

    def __call__(self, name: str) -> ByteSource:
        source = self.opened[name] = LocalBytes(name)
        return source

    @property
    def are_closed(self) -> bool:
        return all(source._file.closed for source in self.opened.values())


@pytest.mark.parametrize("count", [2, 3, 7])
def test_parts_are_read_as_one(whole: Path, tmp_path: Path, count: int) -> None:
    parts = [str(path) for path in split_gguf(whole, count, tmp_path / "parts")]
    opener = Opener()
    file = open_gguf_files(opener, parts)
    assert isinstance(file, GgufParts)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "ä", ""]
    assert file.metadata["llama.block_count"] == 3
    assert file.stored["llama.block_count"] == struct.pack("<II", 4, 3)
    assert set(file.entries) == set(TENSORS)
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(read_matrix(file, name).to_dense(), values)
        assert bytes(file.read_rows(name, 1, 3)) == values[1:3].tobytes()
    with pytest.raises(CorruptModelError, match="no tensor 'absent'"):
        file.read_bytes("absent", 0, 1)
    file.close()
    assert opener.are_closed


def test_a_tensor_costs_its_own_bytes_of_its_own_part(whole: Path, tmp_path: Path) -> None:
    parts = [str(path) for path in split_gguf(whole, 3, tmp_path / "parts")]
    opener = Opener()
    file = open_gguf_files(opener, parts)
    before = {name: source.bytes_read for name, source in opener.opened.items()}
    read_matrix(file, "t4")
    read = {name: source.bytes_read - before[name] for name, source in opener.opened.items()}
    assert read == {parts[0]: 0, parts[1]: 4 * 32 * 4, parts[2]: 0}
    file.close()


def test_one_file_stays_one_file(whole: Path) -> None:
    file = open_gguf_files(LocalBytes, [str(whole)])
    assert not isinstance(file, GgufParts)
    file.close()


def test_names_tell_parts() -> None:
    part = parse_part_name("a/b-00002-of-00003.GGUF")
    assert part is not None
    assert (part.stem, part.number, part.count) == ("a/b", 2, 3)
    assert parse_part_name("a-2-of-3.gguf") is None
    assert parts_with("whole.gguf", ["other.gguf"]) == ("whole.gguf",)
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert parts_with(names[1], [*reversed(names), "n-00001-of-00002.gguf"]) == tuple(names)
    with pytest.raises(CorruptModelError, match="both part 1"):
        parts_with(names[1], [*names, "m-00001-of-00002.GGUF"])


Parts = list[Path]


def swap_names(parts: Parts) -> None:
    other = parts[1].rename(parts[1].with_suffix(".x"))
    parts[2].rename(parts[1])
    other.rename(parts[2])


def rewrite(part: Path, keys: dict[str, bytes], names: tuple[str, ...] = ("extra",)) -> None:
    tensors = [GgufTensor(name, "F32", (1, 1), [bytes(4)]) for name in names]
    with part.open("wb") as file:
        write_gguf(file, keys, tensors)


def cut(part: Path, count: int) -> None:
    part.write_bytes(part.read_bytes()[:-count])


def forget(key: str) -> dict[str, bytes]:
    return {name: value for name, value in split_keys(1, 3, 7).items() if name != key}


LIES: dict[str, tuple[Callable[[Parts], object], str]] = {
    "names swapped": (swap_names, "says split.no 2, where 1 is right"),
    "a part twice": (lambda parts: parts[2].write_bytes(parts[1].read_bytes()), "says split.no 1, where 2 is right"),
    "of another count": (lambda parts: rewrite(parts[1], split_keys(1, 4, 7)), "says split.count 4, where 3 is right"),
    "of other tensors": (
        lambda parts: rewrite(parts[1], split_keys(1, 3, 8)), "says split.tensors.count 8, where 7 is right",
    ),
    "first is another": (lambda parts: rewrite(parts[0], split_keys(1, 3, 7)), "says split.no 1, where 0 is right"),
    "too few tensors": (lambda parts: rewrite(parts[2], split_keys(2, 3, 7)), "hold 6 tensors"),
    "too many tensors": (
        lambda parts: rewrite(parts[2], split_keys(2, 3, 7), ("x", "y", "z")), "hold 8 tensors",
    ),
    "a tensor in two": (lambda parts: rewrite(parts[2], split_keys(2, 3, 7), ("t0", "t2")), "'t0', which is also in"),
    "another model": (
        lambda parts: rewrite(parts[1], {**split_keys(1, 3, 7), "general.architecture": stored_text("qwen2")}),
        "another general.architecture",
    ),
    "no number": (lambda parts: rewrite(parts[1], forget("split.no")), "does not say split.no"),
    "no count": (lambda parts: rewrite(parts[1], forget("split.count")), "does not say split.count"),
    "no tensor count": (lambda parts: rewrite(parts[1], forget("split.tensors.count")), "does not say split.tensors"),
    "a number that is text": (
        lambda parts: rewrite(parts[1], {**split_keys(1, 3, 7), "split.no": stored_text("1")}), "says '1' for",
    ),
    "a negative count": (
        lambda parts: rewrite(parts[0], {**split_keys(0, 3, 7), "split.tensors.count": struct.pack("<Ii", 5, -1)}),
        "says -1 for",
    ),
    "cut short": (lambda parts: cut(parts[1], 100), "is cut short"),
    "cut to nothing": (lambda parts: parts[2].write_bytes(b""), "does not start like"),
    "a whole model as a part": (lambda parts: rewrite(parts[2], {}), "does not say split.count"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_parts_that_lie_are_found(whole: Path, tmp_path: Path, lie: str) -> None:
    parts = split_gguf(whole, 3, tmp_path / "parts")
    damage, message = LIES[lie]
    damage(parts)
    opener = Opener()
    with pytest.raises(CorruptModelError) as caught:
        open_gguf_files(opener, [str(part) for part in parts])
    assert message in caught.value.message
    assert any(str(part) in caught.value.message for part in parts)
    assert caught.value.hint
    assert opener.are_closed


def test_a_part_alone_under_another_name_says_what_it_is(whole: Path, tmp_path: Path) -> None:
    parts = split_gguf(whole, 3, tmp_path / "parts")
    renamed = parts[1].rename(tmp_path / "renamed.gguf")
    with LocalBytes(renamed) as source, pytest.raises(ShardComputeError, match="one of 3 parts") as caught:
        open_gguf(source)
    assert "00001-of-00003" in caught.value.hint


def test_metadata_of_later_parts_is_not_kept(whole: Path, tmp_path: Path) -> None:
    parts = split_gguf(whole, 3, tmp_path / "parts")
    file = open_gguf_files(LocalBytes, [str(part) for part in parts])
    assert isinstance(file, GgufParts)
    assert [len(part.metadata) for part in file._parts[1:]] == [0, 0]
    file.close()
