"""Weight files of any content: they parse and read, or raise one of our errors, and never allocate wildly."""

from __future__ import annotations

import contextlib
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from shardcompute.core.errors import ShardComputeError
from shardcompute.weights.formats.bytes import check_range
from shardcompute.weights.formats.gguf_file import open_gguf
from shardcompute.weights.formats.safetensors_file import open_safetensors, open_sharded
from shardcompute.weights.formats.tensor_file import (
    SingleTensorFile,
    TensorFile,
    read_expert_matrix,
    read_matrix,
    read_vector,
)


class MemoryBytes:
    """A source that refuses to hand out more than it holds and counts what it gave."""

    name = "memory"

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.size = len(content)
        self.bytes_read = 0

    def read(self, offset: int, length: int) -> memoryview:
        check_range(self.name, self.size, offset, length)
        self.bytes_read += length
        return memoryview(self.content)[offset : offset + length]

    def close(self) -> None:
        pass


# The files below have a few kilobytes: whatever they claim, nothing of another order may be made for them.
MAX_PEAK_BYTES = 4 << 20

Parser = Callable[[MemoryBytes], SingleTensorFile]


def read_everything(file: TensorFile) -> None:
    readers: dict[int, Callable[[str], Any]] = {
        1: lambda name: read_vector(file, name),
        2: lambda name: read_matrix(file, name),
        3: lambda name: read_expert_matrix(file, name, 0),
    }
    for name, entry in file.entries.items():
        assert len(file.read_rows(name)) == entry.size_bytes
        if len(entry.shape) in readers:
            try:
                readers[len(entry.shape)](name)
            except ShardComputeError:
                continue


def parses_or_refuses(parser: Parser, content: bytes) -> None:
    tracemalloc.start()
    try:
        file = parser(MemoryBytes(content))
        check_spans(file, len(content))
        read_everything(file)
    except ShardComputeError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < MAX_PEAK_BYTES


def check_spans(file: SingleTensorFile, size: int) -> None:
    spans = sorted((entry.offset, entry.offset + entry.size_bytes) for entry in file.entries.values())
    assert all(0 <= start <= stop <= size for start, stop in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def write_gguf(tensors: dict[str, Any], metadata: dict[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in metadata.items():
            writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
        for name, (raw, kind) in tensors.items():
            writer.add_tensor(name, raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


VALUES = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
SAFETENSORS = save(
    {"a": VALUES, "b": VALUES[0].astype(np.float16), "c": VALUES.reshape(2, 2, 64)}, {"format": "np"}
)
KINDS = [
    gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
]
GGUF = write_gguf(
    {kind.name: (gguf.quantize(VALUES, kind), kind) for kind in KINDS} | {"v": (VALUES[0], None)},
    {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.chat_template": "{{ messages }}"},
)
FILES: list[tuple[Parser, bytes]] = [(open_safetensors, SAFETENSORS), (open_gguf, GGUF)]
both = pytest.mark.parametrize(("parser", "content"), FILES, ids=["safetensors", "gguf"])


@both
def test_the_files_that_are_damaged_below_are_sound(parser: Parser, content: bytes) -> None:
    read_everything(parser(MemoryBytes(content)))


@both
@settings(max_examples=100, deadline=None)
@given(noise=st.binary(max_size=300), keep=st.sampled_from([0, 4, 8, 24, 40]))
def test_any_bytes(parser: Parser, content: bytes, noise: bytes, keep: int) -> None:
    parses_or_refuses(parser, content[:keep] + noise)


@both
@settings(max_examples=150, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 5000)),
)
def test_flipped_bytes_and_cuts(
    parser: Parser, content: bytes, flips: list[tuple[int, int]], cut: int | None
) -> None:
    damaged = bytearray(content)
    for at, value in flips:
        damaged[at % len(damaged)] = value
    parses_or_refuses(parser, bytes(damaged[:cut]))


@both
@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 1200), value=st.integers(0, (1 << 64) - 1))
@example(at=0, value=(1 << 64) - 1)
@example(at=8, value=1 << 62)
@example(at=16, value=1 << 62)
def test_absurd_lengths(parser: Parser, content: bytes, at: int, value: int) -> None:
    parses_or_refuses(parser, content[:at] + value.to_bytes(8, "little") + content[at + 8 :])


@both
def test_every_cut_is_refused(parser: Parser, content: bytes) -> None:
    for length in [*range(0, 700, 7), len(content) - 1]:
        with pytest.raises(ShardComputeError):
            parser(MemoryBytes(content[:length]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
DESCRIPTION = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F4", "BF16", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 1 << 70), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3) | JSON,
    }
)


@settings(max_examples=100, deadline=None)
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), DESCRIPTION | JSON, max_size=3),
    data=st.binary(max_size=40),
)
def test_any_safetensors_header(header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    parses_or_refuses(open_safetensors, len(text).to_bytes(8, "little") + text + data)
    text = json.dumps({"weight_map": header}).encode()
    with contextlib.suppress(ShardComputeError):
        open_sharded(lambda name: MemoryBytes(b""), text)


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"), SHAPES
    ),
    kind=st.sampled_from([np.float32, np.float16]),
)
def test_safetensors_round_trip(shapes: dict[str, list[int]], kind: type[Any]) -> None:
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape).astype(kind) for name, shape in shapes.items()}
    file = open_safetensors(MemoryBytes(save(tensors)))
    assert set(file.entries) == set(tensors)
    for name, value in tensors.items():
        assert file.entries[name].shape == value.shape
        assert bytes(file.read_rows(name)) == value.tobytes()
        if value.ndim == 2:
            np.testing.assert_array_equal(read_matrix(file, name).to_dense(), value)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    height=st.integers(1, 9),
    blocks=st.integers(1, 4),
    tokens=st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=6),
    part=st.data(),
)
def test_gguf_round_trip(kind: Any, height: int, blocks: int, tokens: list[str], part: st.DataObject) -> None:
    values = np.random.default_rng(height).standard_normal((height, blocks * 32)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    file = open_gguf(MemoryBytes(write_gguf({"w": (raw, kind)}, {"tokens": tokens})))
    assert file.metadata["tokens"] == tokens
    assert bytes(file.read_rows("w")) == raw.tobytes()
    start = part.draw(st.integers(0, height))
    stop = part.draw(st.integers(start, height))
    first = part.draw(st.integers(0, blocks))
    last = part.draw(st.integers(first, blocks))
    matrix = read_matrix(file, "w", (start, stop), (first * 32, last * 32))
    expected = gguf.dequantize(raw, kind)[start:stop, first * 32 : last * 32]
    assert matrix.shape == expected.shape
    if expected.size:
        np.testing.assert_allclose(matrix.to_dense(), expected, rtol=1e-6, atol=1e-6)
