"""GGUF files: what the reference writes reads back, and every lie in a header is found."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix
from shardcompute.core.errors import CorruptModelError, ShardComputeError, UnsupportedModelError
from shardcompute.weights.formats import tensor_file
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.gguf_file import GGML_TYPES, open_gguf
from shardcompute.weights.formats.tensor_file import read_expert_matrix, read_matrix, read_vector

RANDOM = np.random.default_rng(0)
MATRIX = RANDOM.standard_normal((10, 256)).astype(np.float32)
EXPERTS = RANDOM.standard_normal((3, 4, 64)).astype(np.float32)
Q4_1 = gguf.GGMLQuantizationType.Q4_1
Q4_K = gguf.GGMLQuantizationType.Q4_K

Open = Callable[[bytes], LocalBytes]


def q4_k_blocks() -> np.ndarray[Any, Any]:
    """Ten rows of one Q4_K block with sane scales (the reference cannot write this type)."""
    blocks = RANDOM.integers(0, 256, (10, 144), dtype=np.uint8)
    blocks[:, :4] = RANDOM.uniform(0, 0.1, (10, 2)).astype("<f2").view(np.uint8)
    return blocks


SUPER = q4_k_blocks()


@pytest.fixture
def written(tmp_path: Path) -> bytes:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.whole", 7)
    writer.add_int64("a.negative", -(1 << 40))
    writer.add_float32("a.fraction", 0.5)
    writer.add_bool("a.truth", True)
    writer.add_string("a.text", "grüße")
    writer.add_array("a.tokens", ["a", "ä", ""])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.truths", [True, False])
    writer.add_array("a.nested", [[1, 2], [3]])
    writer.add_tensor("f32", MATRIX)
    writer.add_tensor("f16", MATRIX.astype(np.float16))
    writer.add_tensor("q4_1", gguf.quantize(MATRIX, Q4_1), raw_dtype=Q4_1)
    writer.add_tensor("q4_k", SUPER, raw_dtype=Q4_K)
    writer.add_tensor("experts", gguf.quantize(EXPERTS, Q4_1), raw_dtype=Q4_1)
    writer.add_tensor("norm", MATRIX[0])
    writer.add_tensor("whole", np.arange(4, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_reads_what_the_reference_writes(opened: Open, written: bytes) -> None:
    file = open_gguf(opened(written))
    expected = {
        "general.architecture": "llama", "a.whole": 7, "a.negative": -(1 << 40), "a.fraction": 0.5,
        "a.truth": True, "a.text": "grüße", "a.tokens": ["a", "ä", ""], "a.numbers": [1, 2, 3],
        "a.truths": [True, False], "a.nested": [[1, 2], [3]],
    }  # fmt: skip
    assert {name: file.metadata[name] for name in expected} == expected
    assert file.entries["q4_1"].shape == (10, 256)
    assert file.entries["experts"].shape == (3, 4, 64)
    assert file.entries["q4_1"].dtype == "Q4_1"
    assert bytes(file.read_rows("f32", 2, 4)) == MATRIX[2:4].tobytes()
    np.testing.assert_array_equal(read_vector(file, "norm", 3, 9), MATRIX[0, 3:9])
    dense = read_matrix(file, "f16", (1, 4), (5, 9))
    assert isinstance(dense, DenseMatrix)
    np.testing.assert_array_equal(dense.values, MATRIX.astype(np.float16)[1:4, 5:9])


@pytest.mark.parametrize("piece_bytes", [1, 400, 1 << 20])
@pytest.mark.parametrize("rows", [None, (3, 8), (4, 4)])
@pytest.mark.parametrize("columns", [None, (32, 96), (64, 64)])
@pytest.mark.parametrize("name", ["q4_1", "q4_k"])
def test_a_part_of_a_quantised_matrix(
    opened: Open,
    written: bytes,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    rows: Any,
    columns: Any,
    name: str,
) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", piece_bytes)
    source = opened(written)
    file = open_gguf(source)
    before = source.bytes_read
    matrix = read_matrix(file, name, rows, columns)
    first, last = rows or (0, 10)
    assert source.bytes_read - before == (last - first) * file.entries[name].row_bytes
    assert isinstance(matrix, BlockMatrix)
    raw, kind = (SUPER, Q4_K) if name == "q4_k" else (gguf.quantize(MATRIX, Q4_1), Q4_1)
    expected = gguf.dequantize(raw, kind)[first:last, slice(*columns) if columns else slice(None)]
    assert matrix.shape == expected.shape
    if expected.size:
        np.testing.assert_allclose(matrix.to_dense(), expected, rtol=1e-6, atol=1e-6)


def test_one_expert(opened: Open, written: bytes) -> None:
    source = opened(written)
    file = open_gguf(source)
    before = source.bytes_read
    matrix = read_expert_matrix(file, "experts", 1, (1, 3), (32, 64))
    assert source.bytes_read - before == 2 * 2 * 20
    expected = gguf.dequantize(gguf.quantize(EXPERTS, Q4_1), Q4_1)[1, 1:3, 32:]
    np.testing.assert_allclose(matrix.to_dense(), expected, rtol=1e-6, atol=1e-6)


def test_columns_must_not_cut_a_block(opened: Open, written: bytes) -> None:
    file = open_gguf(opened(written))
    with pytest.raises(UnsupportedModelError, match="Q4_1 blocks of 32"):
        read_matrix(file, "q4_1", None, (16, 64))


def test_other_numbers_are_refused_by_name(opened: Open, written: bytes) -> None:
    file = open_gguf(opened(written))
    with pytest.raises(UnsupportedModelError, match="I32"):
        read_vector(file, "whole")


def test_only_the_header_is_read(opened: Open, written: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.weights.formats.gguf_file._CHUNK_BYTES", 64)
    source = opened(written)
    file = open_gguf(source)
    header_bytes = min(entry.offset for entry in file.entries.values())
    assert source.bytes_read < 2 * header_bytes < source.size
    assert file.metadata["a.tokens"] == ["a", "ä", ""]


def test_the_type_table_agrees_with_the_format() -> None:
    for kind, size in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # never stored in files; the reference counts its two float16 as float32
            assert GGML_TYPES[int(kind)] == (kind.name, *size)


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: bytes | str, code: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", code) + value


def described(name: str = "t", sizes: tuple[int, ...] = (4,), code: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, code, offset)


def build(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = bytes(64),
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + data


def array(code: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", code, count) + values


def test_a_file_built_by_hand_is_read(opened: Open) -> None:
    content = build(
        [pair("a", 8, text(b"\xff!")), pair("general.alignment", 4, struct.pack("<I", 64))],
        [described(), described("u", (2,), offset=64)],
        bytes(64 + 32 + 8),
        version=2,
    )
    file = open_gguf(opened(content))
    assert file.metadata["a"] == "\udcff!"
    assert file.metadata["a"].encode("utf-8", "surrogateescape") == b"\xff!"
    assert {entry.offset % 64 for entry in file.entries.values()} == {0}


def test_a_tokenizer_that_is_not_wanted_is_passed_over(opened: Open) -> None:
    texts = array(8, 3, text("a") + text("") + text("longer"))
    content = build(
        [
            pair("tokenizer.ggml.tokens", 9, texts),
            pair("tokenizer.ggml.scores", 9, array(6, 3, bytes(12))),
            pair("tokenizer.nested", 9, array(9, 1, texts)),
            pair("tokenizer.model", 8, text("kind")),
            pair("tokenizer.add_bos", 7, b"\1"),
            pair("a", 8, text("kept")),
        ],
        [described()],
    )
    whole, bare = open_gguf(opened(content)), open_gguf(opened(content), with_tokenizer=False)
    assert whole.metadata["tokenizer.ggml.tokens"] == ["a", "", "longer"]
    assert bare.metadata == {"a": "kept"}
    assert (bare.entries, bare.stored) == (whole.entries, whole.stored)


NESTED = array(9, 1) * 10 + array(0, 1, b"\1")
CORRUPT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not start like"),
    "another format": (b"PK\3\4" + bytes(60), "does not start like"),
    "header cut": (build()[:20], "cut short"),
    "too many tensors": (build(counts=(1 << 60, 0)), "1152921504606846976 tensors"),
    "too many values": (build(counts=(0, 1 << 60)), "metadata values"),
    "absurd key": (build([struct.pack("<Q", 1 << 50)], counts=(0, 1)), "a metadata key of"),
    "key not text": (build([pair(b"\xff", 0, b"\1")]), "not UTF-8"),
    "key twice": (build([pair("a", 0, b"\1")] * 2), "'a' twice"),
    "absurd text": (build([pair("a", 8, struct.pack("<Q", 1 << 62))]), "cut short"),
    "unknown value type": (build([pair("a", 99, b"\1")]), "unknown type 99"),
    "unknown element type": (build([pair("a", 9, array(99, 1))]), "unknown type 99"),
    "absurd array": (build([pair("a", 9, array(0, 1 << 60))]), "array elements"),
    "absurd array of texts": (build([pair("a", 9, array(8, 1 << 60))]), "array elements"),
    "deep arrays": (build([pair("a", 9, NESTED)]), "nests arrays"),
    "odd truth": (build([pair("a", 7, b"\2")]), "truth value"),
    "alignment not a power": (build([pair("general.alignment", 4, struct.pack("<I", 24))]), "alignment 24"),
    "alignment of zero": (build([pair("general.alignment", 4, struct.pack("<I", 0))]), "alignment 0"),
    "alignment as text": (build([pair("general.alignment", 8, text("32"))]), "alignment '32'"),
    "five dimensions": (build(tensors=[described(sizes=(1, 1, 1, 1, 1))]), "5 dimensions"),
    "rows of part blocks": (build(tensors=[described(sizes=(33,), code=2)]), "rows of 33"),
    "blocks without rows": (build(tensors=[described(sizes=(), code=2)]), "no dimensions"),
    "overflow": (build(tensors=[described(sizes=(1 << 40, 1 << 40))]), "too large"),
    "huge but empty": (build(tensors=[described(sizes=(0, 1 << 62))]), "too large"),
    "unaligned": (build(tensors=[described(offset=4)]), "not aligned"),
    "beyond the end": (build(tensors=[described(sizes=(17,))]), "cut short"),
    "far away": (build(tensors=[described(offset=1 << 63)]), "cut short"),
    "tensor twice": (build(tensors=[described(), described(offset=32)]), "'t' twice"),
    "overlap": (build(tensors=[described(sizes=(9,)), described("u", offset=32)]), "overlaps"),
}
UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "big-endian": (build(version=3 << 24), "big-endian"),
    "version 1": (build(version=1), "version 1"),
    "version 4": (build(version=4), "version 4"),
    "unknown number type": (build(tensors=[described(code=77)]), "number type 77"),
    "split": (build([pair("split.count", 2, struct.pack("<H", 3))]), "one of 3 parts"),
}


@pytest.mark.parametrize("fault", [*CORRUPT, *UNSUPPORTED])
def test_lies_are_found(opened: Open, fault: str) -> None:
    content, message = (CORRUPT | UNSUPPORTED)[fault]
    source = opened(content)
    kind: type[ShardComputeError] = CorruptModelError if fault in CORRUPT else UnsupportedModelError
    with pytest.raises(kind) as caught:
        open_gguf(source)
    assert message in caught.value.message
    assert source.name in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (pair("tokenizer.a", 8, struct.pack("<Q", 1 << 62)), "cut short"),
        (pair("tokenizer.a", 99, b"\1"), "unknown type 99"),
        (pair("tokenizer.a", 9, array(99, 1)), "unknown type 99"),
        (pair("tokenizer.a", 9, array(0, 1 << 60)), "array elements"),
        (pair("tokenizer.a", 9, array(8, 1 << 60)), "array elements"),
        (pair("tokenizer.a", 9, NESTED), "nests arrays"),
        (pair("tokenizer.a", 0, b"\1") * 2, "twice"),
    ],
)
def test_lies_are_found_in_what_is_passed_over(opened: Open, value: bytes, message: str) -> None:
    count = 2 if message == "twice" else 1
    with pytest.raises(CorruptModelError, match=message):
        open_gguf(opened(build([value], data=b"", counts=(0, count))), with_tokenizer=False)


def test_scales_that_are_not_numbers_are_refused(opened: Open) -> None:
    for bad in (np.inf, np.nan):
        block = np.full(1, bad, "<f2").tobytes() + np.full(1, -bad, "<f2").tobytes() + bytes(16)
        file = open_gguf(opened(build(tensors=[described(sizes=(32, 1), code=3)], data=block)))
        with pytest.raises(CorruptModelError, match=r"'t' .* not numbers"):
            read_matrix(file, "t")


def test_a_type_without_a_decoder_is_named(opened: Open) -> None:
    file = open_gguf(opened(build(tensors=[described(sizes=(256, 1), code=15)], data=bytes(292))))
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        read_matrix(file, "t")


def test_numbers_of_64_bits_are_read_where_32_hold_them(opened: Open) -> None:
    values = np.array([[1.5, -(2.0**100), 0.1]])
    for count, fails in ((2, False), (3, True)):
        data = values[:, :count].astype("<f8").tobytes()
        file = open_gguf(opened(build(tensors=[described(sizes=(count, 1), code=28)], data=data)))
        if fails:
            with pytest.raises(UnsupportedModelError, match="F64 numbers that float32 cannot hold"):
                read_matrix(file, "t")
        else:
            np.testing.assert_array_equal(read_matrix(file, "t").to_dense(), values[:, :count])


def test_few_weights_are_decoded_at_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one bit are many weights in few bytes."""
    monkeypatch.setattr(tensor_file, "_PIECE_WEIGHTS", 1024)
    sizes: list[int] = []
    layout = tensor_file.BLOCK_LAYOUTS["Q1_0"]

    def decode(blocks: Any) -> Any:
        sizes.append(len(blocks) * 128)
        return layout.decode(blocks)

    monkeypatch.setitem(tensor_file.BLOCK_LAYOUTS, "Q1_0", replace(layout, decode=decode))
    rows = np.concatenate([np.ones((40, 1), "<f2").view(np.uint8), np.zeros((40, 16), np.uint8)], axis=1)
    file = open_gguf(opened(build(tensors=[described(sizes=(128, 40), code=41)], data=rows.tobytes())))
    np.testing.assert_array_equal(read_matrix(file, "t").to_dense(), np.full((40, 128), -1, np.float32))
    assert max(sizes) == 1024


def test_headers_have_a_limit_whatever_the_file_holds(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    content = build([pair("a", 9, array(0, 40, bytes(40)))])
    assert open_gguf(opened(content)).metadata["a"] == [0] * 40
    monkeypatch.setattr("shardcompute.weights.formats.gguf_file._MAX_ARRAY_LENGTH", 39)
    with pytest.raises(CorruptModelError, match="array of 40 elements"):
        open_gguf(opened(content))
    monkeypatch.setattr("shardcompute.weights.formats.gguf_file._MAX_HEADER_BYTES", 30)
    with pytest.raises(CorruptModelError, match="absurdly long header"):
        open_gguf(opened(content))
