"""Rows of a table that stays in its file are those of the table, and nothing else is ever read from there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CorruptModelError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.file_rows import ROW_TYPES, FileRows, open_file_rows
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS
from shardcompute.weights.formats.gguf_file import GgufFile, open_gguf
from shardcompute.weights.formats.gguf_writer import GgufTensor, write_gguf
from shardcompute.weights.formats.tensor_file import read_matrix
from shardcompute.weights.loader import ShardTensors
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.gguf.blocks import random_tensor

HEIGHT, WIDTH = 40, 512
IDS = np.array([3, 39, 0, 17])


def noise(name: str, dtype: str) -> GgufTensor:
    if dtype in BLOCK_LAYOUTS:
        return random_tensor(name, dtype, (HEIGHT, WIDTH), 1, 0.02)
    values = np.random.default_rng(1).standard_normal((HEIGHT, WIDTH), dtype=np.float32)
    kinds = {"F32": values, "F16": values.astype("<f2"), "BF16": (values.view("<u4") >> 16).astype("<u2")}
    return GgufTensor(name, dtype, (HEIGHT, WIDTH), [kinds[dtype].tobytes()])


def saved(path: Path, dtype: str) -> GgufFile:
    with path.open("wb") as file:
        write_gguf(file, {}, [noise(name, dtype) for name in ("a", "b")])
    return open_gguf(LocalBytes(path))


def opened(file: GgufFile) -> FileRows:
    rows = open_file_rows(file, file.entries["b"])
    assert rows is not None
    return rows


def model(path: Path) -> Checkpoint:
    return open_checkpoint(resolve(parse_reference(str(path)), Settings(path.parent)))


@pytest.mark.parametrize("dtype", sorted(ROW_TYPES))
def test_rows_are_those_of_the_whole_matrix(tmp_path: Path, dtype: str) -> None:
    file = saved(tmp_path / "model.gguf", dtype)
    whole = read_matrix(file, "b").to_dense()
    with opened(file) as rows:
        file.close()
        assert rows.shape == (HEIGHT, WIDTH)
        assert np.array_equal(rows.read(IDS).to_dense(), whole[IDS])


def test_a_file_that_changes_is_not_read_any_more(tmp_path: Path) -> None:
    with closing(saved(tmp_path / "model.gguf", "Q8_0")) as file:
        rows = opened(file)
    rows.read(IDS)
    (tmp_path / "model.gguf").write_bytes(b"something else")
    with pytest.raises(CorruptModelError, match="changed while it was in use"):
        rows.read(IDS)


def test_a_file_that_is_deleted_can_still_be_read(tmp_path: Path) -> None:
    with closing(saved(tmp_path / "model.gguf", "Q4_1")) as file:
        whole = read_matrix(file, "b").to_dense()
        rows = opened(file)
    (tmp_path / "model.gguf").unlink()
    assert np.array_equal(rows.read(IDS).to_dense(), whole[IDS])
    rows.close()
    with pytest.raises(UsageError, match="closed"):
        rows.read(IDS)


def test_an_engine_that_looks_tokens_up_in_the_file_computes_the_same_bits(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.array([1, 5, 1, 49151, 7])
    options = ExecutorOptions(kv_bytes=8 << 20, context_length=64)
    answers = []
    for is_stored in (True, False):
        with monkeypatch.context() as patch, model(smollm2_gguf) as checkpoint:
            if not is_stored:
                patch.setattr(ShardTensors, "stored_rows", lambda self, name: None)
            engine = open_shard(checkpoint, options=options)
        answers.append(engine.step([Segment(1, 0, len(ids), len(ids))], ids).copy())
        engine.close()
    assert np.array_equal(*answers)
