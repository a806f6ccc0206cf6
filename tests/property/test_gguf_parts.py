"""Blocks and split GGUF files of any content: exact, or refused by one of our errors, and never wild with memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import ShardComputeError
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS
from shardcompute.weights.formats.gguf_file import open_gguf
from shardcompute.weights.formats.gguf_parts import open_gguf_files
from shardcompute.weights.formats.gguf_writer import GgufTensor, stored_text, write_gguf
from shardcompute.weights.formats.tensor_file import read_expert_matrix, read_matrix, read_vector
from shardcompute.weights.sources.resolve import MemoryBytes
from support.gguf.parts import split_keys

MAX_PEAK_BYTES = 4 << 20
RANDOM = np.random.default_rng(0)
WITH_MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")


def file_of(keys: dict[str, bytes], tensors: Sequence[GgufTensor]) -> bytes:
    file = BytesIO()
    write_gguf(file, keys, tensors)
    return file.getvalue()


def block_tensor(dtype: str, rows: int = 2) -> GgufTensor:
    """Of blocks of zeros, which every type can mean."""
    layout = BLOCK_LAYOUTS[dtype]
    return GgufTensor(dtype, dtype, (rows, layout.file_block), [bytes(rows * layout.file_bytes)])


def parts_of(count: int) -> list[bytes]:
    """A model with a tensor of every type, dealt out to so many parts."""
    tensors = [block_tensor(dtype) for dtype in BLOCK_LAYOUTS]
    tensors.append(GgufTensor("experts", "MXFP4", (3, 2, 64), [bytes(3 * 2 * 2 * 17)]))
    tensors.append(GgufTensor("norm", "F32", (8,), [bytes(32)]))
    own = {"general.architecture": stored_text("llama"), "general.name": stored_text("tiny")}
    return [
        file_of(
            split_keys(number, count, len(tensors)) | (own if number == 0 else {}), tensors[number::count]
        )
        for number in range(count)
    ]


PARTS = parts_of(3)


def read_everything(contents: Sequence[bytes]) -> int:
    """How many tensors the parts hold; each is read, or refused."""
    sources = {str(number): MemoryBytes(f"part {number}", content) for number, content in enumerate(contents)}
    file = open_gguf_files(sources.__getitem__, list(sources))
    readers: dict[int, Any] = {
        1: read_vector,
        2: read_matrix,
        3: lambda file, name: read_expert_matrix(file, name, 0),
    }
    for name, entry in file.entries.items():
        assert len(file.read_rows(name)) == entry.size_bytes
        if len(entry.shape) in readers:
            try:
                readers[len(entry.shape)](file, name)
            except ShardComputeError:
                continue
    return len(file.entries)


def reads_or_refuses(contents: Sequence[bytes]) -> None:
    tracemalloc.start()
    try:
        read_everything(contents)
    except ShardComputeError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < MAX_PEAK_BYTES


def test_the_parts_that_are_damaged_below_are_sound() -> None:
    assert read_everything(PARTS) == len(BLOCK_LAYOUTS) + 2


@settings(max_examples=150, deadline=None)
@given(
    number=st.integers(0, 2),
    flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 5000)),
)
def test_flipped_bytes_and_cuts(number: int, flips: list[tuple[int, int]], cut: int | None) -> None:
    damaged = bytearray(PARTS[number])
    for at, value in flips:
        damaged[at % min(len(damaged), 1500)] = value
    reads_or_refuses([*PARTS[:number], bytes(damaged[:cut]), *PARTS[number + 1 :]])


@settings(max_examples=100, deadline=None)
@given(number=st.integers(0, 2), at=st.integers(0, 900), value=st.integers(0, (1 << 64) - 1))
def test_absurd_numbers(number: int, at: int, value: int) -> None:
    content = PARTS[number]
    damaged = content[:at] + value.to_bytes(8, "little") + content[at + 8 :]
    reads_or_refuses([*PARTS[:number], damaged, *PARTS[number + 1 :]])


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_only_all_parts_in_order_are_the_model(order: list[int]) -> None:
    contents = [PARTS[number] for number in order]
    if order == [0, 1, 2]:
        assert read_everything(contents) == len(BLOCK_LAYOUTS) + 2
    else:
        with pytest.raises(ShardComputeError):
            read_everything(contents)


KEYS = st.fixed_dictionaries(
    {
        "number": st.integers(0, 4),
        "count": st.integers(0, 4),
        "tensors": st.integers(-2, 30),
    }
)


@settings(max_examples=60, deadline=None)
@given(said=st.lists(KEYS, min_size=2, max_size=3), names=st.data())
def test_what_parts_say_of_each_other_is_checked(said: list[dict[str, int]], names: st.DataObject) -> None:
    """Parts are taken only if they say what is so, and no tensor comes twice."""
    held = [names.draw(st.lists(st.sampled_from("abcd"), max_size=2, unique=True)) for _ in said]
    contents = [
        file_of(split_keys(**each), [GgufTensor(name, "F32", (1,), [bytes(4)]) for name in tensors])
        for each, tensors in zip(said, held, strict=True)
    ]
    total = sum(map(len, held))
    is_so = len({name for part in held for name in part}) == total and all(
        each == {"number": number, "count": len(said), "tensors": total} for number, each in enumerate(said)
    )
    if is_so:
        assert read_everything(contents) == total
    else:
        with pytest.raises(ShardComputeError):
            read_everything(contents)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from([name for name in BLOCK_LAYOUTS if name not in ("Q1_0", "Q2_0")]),
    seed=st.integers(0, 1 << 32),
    height=st.integers(1, 4),
    blocks=st.integers(1, 3),
    part=st.data(),
)
def test_any_blocks_mean_what_the_reference_says(
    dtype: str, seed: int, height: int, blocks: int, part: st.DataObject
) -> None:
    """Random bytes, with whatever scales they come to: the same bits, or refused because a scale is no number."""
    layout, kind = BLOCK_LAYOUTS[dtype], gguf.GGMLQuantizationType[dtype]
    raw = np.random.default_rng(seed).integers(0, 256, (height, blocks * layout.file_bytes), dtype=np.uint8)
    shape = (height, blocks * layout.file_block)
    content = file_of({}, [GgufTensor("w", dtype, shape, [raw.tobytes()])])
    size = layout.block_size
    first = part.draw(st.integers(0, shape[1] // size - 1)) * size
    last = part.draw(st.integers(first // size + 1, shape[1] // size)) * size
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind)
        try:
            matrix = read_matrix(open_gguf(MemoryBytes("memory", content)), "w", None, (first, last))
        except ShardComputeError:
            assert not (np.abs(expected) < 2.0**118).all()
            return
        found, wanted = matrix.to_dense(), expected[:, first:last]
    if dtype in WITH_MINIMA:
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=2e-6 * np.abs(expected).max())
    else:
        np.testing.assert_array_equal(found, wanted)
