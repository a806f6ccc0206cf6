"""Stages as GGUF files: which layers, numbers and key-values they hold, and what becomes of the files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from shardcompute.bench.engine.random_gguf import LlamaShape, write_random_gguf
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.spec import Stage
from shardcompute.weights.attached import AttachedTensors
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.gguf_file import GgufFile, open_gguf
from shardcompute.weights.formats.gguf_parts import open_gguf_files
from shardcompute.weights.gguf_stage import (
    HEADER,
    GgufHeader,
    header_attachment,
    header_of,
    served_header,
    stage_file,
)
from support.gguf.parts import split_gguf

SHAPE = LlamaShape(4, 64, 96, 4, 2, 320)


Open = Callable[[Path], GgufFile]


@pytest.fixture
def opened() -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def open_file(path: Path) -> GgufFile:
            return stack.enter_context(contextlib.closing(open_gguf(LocalBytes(path))))

        yield open_file


@pytest.fixture
def original(tmp_path: Path, opened: Open) -> GgufFile:
    return opened(write_random_gguf(tmp_path / "model.gguf", SHAPE, "Q4_0"))


def header(original: GgufFile) -> GgufHeader:
    found = header_of(original)
    assert found is not None
    return found


def test_a_middle_stage_has_its_layers_from_zero_and_a_stub_vocabulary(
    original: GgufFile, opened: Open, tmp_path: Path
) -> None:
    with stage_file(header(original), original, Stage(1, 3, 4), 320, tmp_path / "stages") as path:
        stage = opened(path)
        for name, entry in stage.entries.items():
            if name.startswith("blk."):
                _, layer, rest = name.split(".", 2)
                stored = f"blk.{int(layer) + 1}.{rest}"
                assert bytes(stage.read_rows(name)) == bytes(original.read_rows(stored))
                assert entry.dtype == original.entries[stored].dtype
        assert len([name for name in stage.entries if name.startswith("blk.")]) == 2 * 9
        assert stage.metadata["llama.block_count"] == 2
        assert stage.metadata["llama.vocab_size"] == stage.entries["token_embd.weight"].shape[0] == 32
        assert "output.weight" not in stage.entries
        assert stage.metadata["llama.rope.freq_base"] == 1e4
        reader = gguf.GGUFReader(path)  # another reader of the format agrees
        assert len(reader.tensors) == len(stage.entries)
    assert list((tmp_path / "stages").iterdir()) == []


def test_first_and_last_have_what_they_need_of_the_vocabulary(
    original: GgufFile, opened: Open, tmp_path: Path
) -> None:
    with stage_file(header(original), original, Stage(0, 2, 4), 320, tmp_path) as path:
        first = opened(path)
        assert bytes(first.read_rows("token_embd.weight")) == bytes(original.read_rows("token_embd.weight"))
        assert "output.weight" not in first.entries
    with stage_file(header(original), original, Stage(2, 4, 4), 320, tmp_path) as path:
        last = opened(path)
        assert bytes(last.read_rows("output.weight")) == bytes(original.read_rows("output.weight"))
        assert not any(last.read_rows("token_embd.weight"))  # nobody looks at it: a hole
        assert last.entries["token_embd.weight"].shape == (320, 64)


def test_parts_of_a_split_file_make_the_same_stage(original: GgufFile, tmp_path: Path) -> None:
    parts = split_gguf(tmp_path / "model.gguf", 3, tmp_path / "parts")
    file = open_gguf_files(LocalBytes, [str(part) for part in parts])
    contents = []
    for tensors in (original, file):
        found = header_of(tensors)
        assert found is not None
        with stage_file(found, tensors, Stage(1, 3, 4), 320, tmp_path / "stages") as path:
            reader = gguf.GGUFReader(path)
            contents.append({tensor.name: bytes(tensor.data) for tensor in reader.tensors})
            assert not any(key.startswith("split.") for key in reader.fields)
    assert contents[0] == contents[1]
    file.close()


def test_arrays_with_an_element_for_every_layer_are_cut(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "arrays.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_array("llama.attention.head_count_kv", [1, 2, 3, 4])
    writer.add_array("llama.rope.dimension_sections", [7, 8])
    for name in ("token_embd.weight", *(f"blk.{i}.attn_norm.weight" for i in range(4))):
        writer.add_tensor(name, np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = opened(path)
    with stage_file(header(file), file, Stage(1, 3, 4), 4, tmp_path / "stages") as cut:
        metadata = opened(cut).metadata
        assert metadata["llama.attention.head_count_kv"] == [2, 3]
        assert metadata["llama.rope.dimension_sections"] == [7, 8]


def test_the_header_travels_without_the_tokenizer(original: GgufFile) -> None:
    attached = AttachedTensors(original, header_attachment(original))
    found = served_header(attached)
    assert found == header(original)
    assert not any(key.startswith("tokenizer.") for key in found.values)
    assert set(found.tensors) == {"output_norm.weight"}


def test_what_is_no_gguf_file_has_none(original: GgufFile) -> None:
    plain = AttachedTensors(original, {})
    assert header_of(plain) is None
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        served_header(plain)
    with pytest.raises(CorruptModelError, match="cannot be read"):
        served_header(AttachedTensors(original, {HEADER: b"\x81"}))


def test_a_failure_while_writing_leaves_nothing(original: GgufFile, tmp_path: Path) -> None:
    class Broken:
        entries, metadata, name = original.entries, original.metadata, original.name

        def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
            if name.startswith("blk.1."):
                raise CorruptModelError("damaged")
            return original.read_bytes(name, offset, length)

        def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
            return original.read_rows(name, start, stop)

        def close(self) -> None: ...

    with (
        pytest.raises(CorruptModelError, match="damaged"),
        stage_file(header(original), Broken(), Stage(0, 2, 4), 320, tmp_path / "stages"),
    ):
        pass
    assert list((tmp_path / "stages").iterdir()) == []
