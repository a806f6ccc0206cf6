"""Models that are read from where the coordinator of the same machine serves them: the very file, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CorruptModelError, LinkError
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage, whole
from shardcompute.node.weights import originals
from shardcompute.node.weights.client import RemoteTensors, open_remote_shard
from shardcompute.node.weights.originals import note_original, open_original
from shardcompute.node.weights.pieces import Supplier
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.served import ServedWeights, prepare_served
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.wire import Link
from support.gguf.blocks import save_block_gguf
from support.gguf.parts import split_gguf
from support.models.tiny_checkpoint import save_tiny_llama

OPTIONS = ExecutorOptions(kv_bytes=1 << 22, context_length=64, max_rows=16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(originals.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("SHARDCOMPUTE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    path = save_tiny_llama(tmp_path / "tiny", layers=2)
    with open_checkpoint(resolve(parse_reference(str(path)), Settings(data_dir=tmp_path))) as opened:
        yield opened


def nobody() -> Link:
    raise LinkError("nothing may be fetched")


def logits_of(served: ServedWeights, stage: Stage) -> object:
    original = open_original(served.card)
    assert original is not None
    sources = [Supplier("origin", nobody, is_origin=True)]
    with original, RemoteTensors(served.card, sources, None, original=original) as tensors:
        executor = open_remote_shard(served.card, stage, tensors, backend="numpy", options=OPTIONS)
        original.check()
    return executor.step([Segment(1, 0, 3, 3)], np.array([1, 2, 3]))


@pytest.mark.parametrize("form", ["native", "int8"])
def test_a_shard_is_read_from_the_file_and_nobody_is_asked(
    checkpoint: Checkpoint, tmp_path: Path, form: str
) -> None:
    served = prepare_served(checkpoint, form, tmp_path / "served")
    assert note_original(served.card, served.origin) is not None
    expected = open_shard(checkpoint, backend="numpy", form=form, options=OPTIONS)
    ids = np.array([1, 2, 3])
    assert np.array_equal(
        logits_of(served, whole(checkpoint.spec)),  # type: ignore[arg-type]
        expected.step([Segment(1, 0, 3, 3)], ids),
    )
    served.tensors.close()


def test_a_file_that_was_changed_is_not_taken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    served = prepare_served(checkpoint, "native", tmp_path / "served")
    note_original(served.card, served.origin)
    weights = tmp_path / "tiny" / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert open_original(served.card) is None


def test_parts_of_a_split_gguf_are_read_where_they_lie(tmp_path: Path) -> None:
    whole_file = save_block_gguf(tmp_path / "tiny.gguf", ["Q3_K", "IQ2_S"], layers=2)
    parts = split_gguf(whole_file, 3, tmp_path / "parts")
    with open_checkpoint(resolve(parse_reference(str(parts[1])), Settings(data_dir=tmp_path))) as checkpoint:
        served = prepare_served(checkpoint, "native", tmp_path / "served")
        assert served.origin is not None
        assert list(served.origin.files) == parts
        assert note_original(served.card, served.origin) is not None
        expected = open_shard(checkpoint, backend="numpy", options=OPTIONS)
        assert np.array_equal(
            logits_of(served, whole(checkpoint.spec)),  # type: ignore[arg-type]
            expected.step([Segment(1, 0, 3, 3)], np.array([1, 2, 3])),
        )
        os.utime(parts[2], ns=(1, 1))
        assert open_original(served.card) is None


def test_a_file_that_changes_while_it_is_read_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    served = prepare_served(checkpoint, "native", tmp_path / "served")
    note_original(served.card, served.origin)
    original = open_original(served.card)
    assert original is not None
    with original:
        original.check()
        os.utime(tmp_path / "tiny" / "model.safetensors", ns=(1, 1))
        with pytest.raises(CorruptModelError, match="changed"):
            original.check()


def test_other_models_and_broken_notes_are_no_originals(checkpoint: Checkpoint, tmp_path: Path) -> None:
    served = prepare_served(checkpoint, "native", tmp_path / "served")
    assert open_original(served.card) is None
    note = note_original(served.card, served.origin)
    assert note is not None
    note.write_bytes(b"{")
    assert open_original(served.card) is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owners here")
def test_a_folder_that_others_can_write_to_is_not_used(checkpoint: Checkpoint, tmp_path: Path) -> None:
    served = prepare_served(checkpoint, "native", tmp_path / "served")
    assert note_original(served.card, served.origin) is not None
    folder = originals.originals_folder()
    assert folder is not None
    folder.chmod(0o777)
    assert open_original(served.card) is None
    assert note_original(served.card, served.origin) is None
