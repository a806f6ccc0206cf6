"""Safetensors files: what the reference writes reads back, and every lie in a header is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from shardcompute.backends.matrix import DenseMatrix
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.safetensors_file import open_safetensors, open_sharded
from shardcompute.weights.formats.tensor_file import read_expert_matrix, read_matrix, read_vector

RANDOM = np.random.default_rng(0)
MATRIX = RANDOM.standard_normal((6, 8)).astype(np.float32)
EXPERTS = RANDOM.standard_normal((3, 4, 5)).astype(np.float16)
TENSORS: dict[str, Any] = {
    "f32": MATRIX,
    "f16": MATRIX.astype(np.float16),
    "bf16": MATRIX.astype(ml_dtypes.bfloat16),
    "experts": EXPERTS,
    "norm": MATRIX[0].astype(ml_dtypes.bfloat16),
    "whole": np.arange(6, dtype=np.int64).reshape(2, 3),
    "doubles": MATRIX[0].astype(np.float64),
}

Open = Callable[[bytes], LocalBytes]


def with_header(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(shape: Any, start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_reads_what_the_reference_writes(opened: Open) -> None:
    file = open_safetensors(opened(save(TENSORS, {"format": "np"})))
    assert dict(file.metadata) == {"format": "np"}
    assert set(file.entries) == set(TENSORS)
    for name, value in TENSORS.items():
        entry = file.entries[name]
        assert (entry.shape, entry.size_bytes) == (value.shape, value.nbytes)
        assert bytes(file.read_rows(name)) == value.tobytes()
        assert bytes(file.read_rows(name, 1, 2)) == value[1:2].tobytes()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows", [None, (2, 5), (3, 3)])
@pytest.mark.parametrize("columns", [None, (1, 4), (0, 8)])
def test_a_part_of_a_matrix(opened: Open, name: str, rows: Any, columns: Any) -> None:
    file = open_safetensors(opened(save(TENSORS)))
    matrix = read_matrix(file, name, rows, columns)
    assert isinstance(matrix, DenseMatrix)
    assert matrix.values.dtype == {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[name]
    expected = TENSORS[name][
        slice(*rows) if rows else slice(None), slice(*columns) if columns else slice(None)
    ]
    np.testing.assert_array_equal(matrix.to_dense(), expected.astype(np.float32))


def test_rows_cost_their_own_bytes_only(opened: Open) -> None:
    source = opened(save(TENSORS))
    file = open_safetensors(source)
    before = source.bytes_read
    read_matrix(file, "f32", (2, 5))
    assert source.bytes_read - before == 3 * 8 * 4
    before = source.bytes_read
    read_expert_matrix(file, "experts", 1, (1, 3))
    assert source.bytes_read - before == 2 * 5 * 2


def test_one_expert(opened: Open) -> None:
    file = open_safetensors(opened(save(TENSORS)))
    np.testing.assert_array_equal(read_expert_matrix(file, "experts", 2).to_dense(), EXPERTS[2])
    part = read_expert_matrix(file, "experts", 1, (1, 3), (2, 5))
    np.testing.assert_array_equal(part.to_dense(), EXPERTS[1, 1:3, 2:5])
    with pytest.raises(CorruptModelError, match="experts 3 to 4"):
        read_expert_matrix(file, "experts", 3)


def test_a_vector_is_widened(opened: Open) -> None:
    file = open_safetensors(opened(save(TENSORS)))
    vector = read_vector(file, "norm", 2, 6)
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(vector, TENSORS["norm"][2:6].astype(np.float32))


def test_what_is_asked_for_must_exist(opened: Open) -> None:
    file = open_safetensors(opened(save(TENSORS)))
    with pytest.raises(CorruptModelError, match="no tensor 'absent'"):
        read_matrix(file, "absent")
    with pytest.raises(CorruptModelError, match="rows 5 to 7"):
        read_matrix(file, "f32", (5, 7))
    with pytest.raises(CorruptModelError, match="columns -1 to 3"):
        read_matrix(file, "f32", None, (-1, 3))
    with pytest.raises(CorruptModelError, match="2 dimensions are needed"):
        read_matrix(file, "norm")
    with pytest.raises(CorruptModelError, match="bytes 16 to 24"):
        file.read_bytes("norm", 16, 8)


def test_other_numbers_are_refused_by_name(opened: Open) -> None:
    file = open_safetensors(opened(save(TENSORS)))
    with pytest.raises(UnsupportedModelError, match="I64"):
        read_matrix(file, "whole")


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "header longer than the file": (with_header({}, length=3), "claims a header of 3 bytes"),
    "absurd header": (with_header({}, length=1 << 63), "claims a header"),
    "not text": (with_header(b"\xff\xff"), "JSON"),
    "not JSON": (with_header(b"{x"), "JSON"),
    "deep": (with_header(b"[" * 100_000), "JSON"),
    "huge integer": (with_header(b'{"a":' + b"9" * 10_000 + b"}"), "JSON"),
    "not an object": (with_header([]), "not an object"),
    "a tensor twice": (with_header(b'{"a":{},"a":{}}'), "twice"),
    "metadata of numbers": (with_header({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata as a list": (with_header({"__metadata__": []}), "__metadata__"),
    "tensor not an object": (with_header({"a": 3}), "describes 'a'"),
    "missing field": (with_header({"a": {"dtype": "F32", "shape": []}}), "describes 'a'"),
    "unknown type": (with_header({"a": tensor([1], 0, 4, "F7")}, bytes(4)), "unknown number type 'F7'"),
    "type not text": (with_header({"a": tensor([1], 0, 4, [])}, bytes(4)), "unknown number type"),
    "negative size": (with_header({"a": tensor([-1], 0, 4)}, bytes(4)), "impossible shape"),
    "size as truth": (with_header({"a": tensor([True], 0, 4)}, bytes(4)), "impossible shape"),
    "fractional size": (with_header({"a": tensor([1.0], 0, 4)}, bytes(4)), "impossible shape"),
    "shape not a list": (with_header({"a": tensor(1, 0, 4)}, bytes(4)), "impossible shape"),
    "too many offsets": (
        with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(4)), "impossible"
    ),
    "overflow": (with_header({"a": tensor([1 << 40, 1 << 40], 0, 4)}, bytes(4)), "too large"),
    "huge but empty": (with_header({"a": tensor([1 << 62, 0], 0, 0)}), "too large"),
    "wrong size": (with_header({"a": tensor([2], 0, 4)}, bytes(4)), "4 bytes where"),
    "backwards": (with_header({"a": tensor([1], 4, 0)}, bytes(4)), "-4 bytes where"),
    "half a byte": (with_header({"a": tensor([1], 0, 0, "F4")}), "needs 0.5"),
    "overlap": (with_header({"a": tensor([2], 0, 8), "b": tensor([1], 4, 8)}, bytes(8)), "overlaps"),
    "hole": (with_header({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, bytes(12)), "hole"),
    "hole first": (with_header({"a": tensor([1], 4, 8)}, bytes(8)), "hole"),
    "cut short": (with_header({"a": tensor([2], 0, 8)}, bytes(7)), "cut short"),
    "left over": (with_header({"a": tensor([1], 0, 4)}, bytes(5)), "left over"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_lies_are_found(opened: Open, fault: str) -> None:
    content, message = FAULTS[fault]
    source = opened(content)
    with pytest.raises(CorruptModelError) as caught:
        open_safetensors(source)
    assert message in caught.value.message
    assert caught.value.message.startswith(source.name)
    assert caught.value.hint


def test_headers_have_a_limit_whatever_the_file_holds(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.weights.formats.safetensors_file._MAX_HEADER_BYTES", 10)
    with pytest.raises(CorruptModelError, match="claims a header of 11 bytes"):
        open_safetensors(opened(with_header(b"{}" + b" " * 9)))
    assert not open_safetensors(opened(with_header(b"{}" + b" " * 8))).entries


def test_an_empty_tensor_and_an_empty_file_are_fine(opened: Open) -> None:
    file = open_safetensors(
        opened(save({"a": np.zeros((0, 4), np.float32), "b": np.zeros((3, 0), np.float32)}))
    )
    assert read_matrix(file, "a").shape == (0, 4)
    assert read_matrix(file, "b").shape == (3, 0)
    assert not open_safetensors(opened(with_header({}))).entries


def index(weight_map: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.safetensors").write_bytes(save({"f32": MATRIX}))
    (tmp_path / "two.safetensors").write_bytes(save({"experts": EXPERTS}))
    return tmp_path


def test_shards_open_when_they_are_needed(folder: Path) -> None:
    opened_names: list[str] = []

    def open_source(name: str) -> LocalBytes:
        opened_names.append(name)
        return LocalBytes(folder / name)

    file = open_sharded(open_source, index({"f32": "one.safetensors", "experts": "two.safetensors"}))
    assert set(file.entries) == {"f32", "experts"}
    assert "f32" in file.entries
    assert len(file.entries) == 2
    assert file.metadata["total_size"] == 1
    assert not opened_names
    np.testing.assert_array_equal(read_matrix(file, "f32", (1, 3)).to_dense(), MATRIX[1:3])
    assert bytes(file.read_rows("f32", 5)) == MATRIX[5:].tobytes()
    assert opened_names == ["one.safetensors"]
    assert read_expert_matrix(file, "experts", 0).shape == (4, 5)
    assert opened_names == ["one.safetensors", "two.safetensors"]
    file.close()


def test_an_index_that_names_what_a_shard_lacks(folder: Path) -> None:
    file = open_sharded(lambda name: LocalBytes(folder / name), index({"absent": "one.safetensors"}))
    with pytest.raises(CorruptModelError, match=r"one\.safetensors has no tensor 'absent'"):
        read_matrix(file, "absent")
    with pytest.raises(CorruptModelError, match=r"index\.json has no tensor 'f32'"):
        read_matrix(file, "f32")
    file.close()


def test_a_damaged_shard_is_closed_again(folder: Path) -> None:
    (folder / "one.safetensors").write_bytes(b"damaged")
    file = open_sharded(lambda name: LocalBytes(folder / name), index({"f32": "one.safetensors"}))
    with pytest.raises(CorruptModelError, match="too short"):
        file.read_rows("f32")


@pytest.mark.parametrize("shard", ["../one.safetensors", "/etc/passwd", "a\\b", "c:x", "..", "", 3, None])
def test_shards_are_plain_names(shard: Any) -> None:
    with pytest.raises(CorruptModelError, match="plain file name"):
        open_sharded(lambda name: pytest.fail(f"opened {name}"), index({"a": shard}))


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"weight_map":[]}', b'{"weight_map":{},"metadata":1}'])
def test_a_damaged_index(text: bytes) -> None:
    with pytest.raises(CorruptModelError, match=r"index\.json"):
        open_sharded(lambda name: pytest.fail(f"opened {name}"), text)
