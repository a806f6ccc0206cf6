"""Quantised checkpoints travel as they are stored: a worker is sent the original tensors and folds them itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage
from shardcompute.weights.card import decode_card, encode_card
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.formats.tensor_file import TensorEntry, TensorFile, read_matrix
from shardcompute.weights.held import held_sizes_of_card, held_sizes_of_entries
from shardcompute.weights.quantised.folded_file import stored_file
from shardcompute.weights.quantised.schemes import open_quantised
from shardcompute.weights.served import prepare_served, shard_source
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import save_tiny_llama
from support.quantised.checkpoint import FORMS, quantise_folder, save_tensors

STAGE = Stage(2, 4, 6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("plain") / "tiny")


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder.parent)))


class Sent:
    """Only these tensors of a file."""

    def __init__(self, file: TensorFile, names: tuple[str, ...]) -> None:
        self._file = file
        self.name, self.metadata = "sent", file.metadata
        self.entries: Mapping[str, TensorEntry] = {name: file.entries[name] for name in names}

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        assert name in self.entries
        return self._file.read_bytes(name, offset, length)

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        assert name in self.entries
        return self._file.read_rows(name, start, stop)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("form", FORMS)
def test_a_stage_is_made_of_the_original_tensors_alone(form: str, plain: Path, tmp_path: Path) -> None:
    folder, _ = quantise_folder(plain, tmp_path, form)
    with opened(folder) as checkpoint:
        served = prepare_served(checkpoint, "native", tmp_path)
        card = decode_card(encode_card(served.card))
        stored = stored_file(checkpoint.tensors)
        names = card.stage_tensors(STAGE)
        assert all(".layers.2." in name or ".layers.3." in name for name in names)
        assert card.stage_bytes(STAGE) == sum(stored.entries[name].size_bytes for name in names)
        assert card.layer_bytes(2) < plain.joinpath("model.safetensors").stat().st_size // 6
        # All that a worker has besides the ends' shapes, which are checked.
        sent = Sent(served.tensors, (*names, *(place.stored for place in card.layout.model.values())))
        there, here = shard_source(card, sent, STAGE), checkpoint.source(STAGE)
        for layer in (2, 3):
            for name, place in card.layout.layers[layer].items():
                if len(place.shape) == 2:
                    ours, theirs = here.matrix(name, layer), there.matrix(name, layer)
                    assert type(ours) is type(theirs)
                    np.testing.assert_array_equal(ours.to_dense(), theirs.to_dense())


@pytest.mark.parametrize("form", FORMS)
def test_what_is_held_is_what_is_promised(form: str, plain: Path, tmp_path: Path) -> None:
    folder, _ = quantise_folder(plain, tmp_path, form)
    with opened(folder) as checkpoint:
        card = prepare_served(checkpoint, "native", tmp_path).card
        sizes = held_sizes_of_card(card, context_length=256)
        entries = checkpoint.tensors.entries
        assert sizes == held_sizes_of_entries(card.spec, card.layout, entries, "native", context_length=256)
        matrix = checkpoint.source(STAGE).matrix("mlp.down", 2)
        held = next(each for each in sizes if each.holder == "onnx/cpu")
        narrow = next(each for each in sizes if each.holder == "torch/cpu")
        if isinstance(matrix, DenseMatrix):
            assert held.layer_bytes == narrow.layer_bytes
        else:
            assert isinstance(matrix, BlockMatrix)
            assert held.layer_bytes[2] < narrow.layer_bytes[2] / (1.9 if matrix.bits == 8 else 2.9)


@pytest.mark.parametrize("form", ["fp8-blocks", "nf4-nested"])
def test_they_can_be_rounded_and_packed_like_others(form: str, plain: Path, tmp_path: Path) -> None:
    folder, _ = quantise_folder(plain, tmp_path, form)
    with opened(folder) as checkpoint:
        served = prepare_served(checkpoint, "int8", tmp_path)
        matrix = shard_source(served.card, served.tensors, STAGE).matrix("mlp.down", 2)
        served.tensors.close()
        assert isinstance(matrix, BlockMatrix)
        assert matrix.bits == 8
        rounded = checkpoint.source(STAGE, form="int8").matrix("mlp.down", 2)
        np.testing.assert_array_equal(matrix.to_dense(), rounded.to_dense())


@pytest.mark.parametrize(("form", "row_bytes"), [("int4", 32 + 2 * 2), ("fp8-rows", 64 + 4), ("nf4", 32)])
def test_rows_cost_their_own_bytes(form: str, row_bytes: int, tmp_path: Path) -> None:
    weights = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)
    save_tensors(tmp_path / "m.safetensors", FORMS[form].quantise("m", weights)[0])
    with LocalBytes(tmp_path / "m.safetensors") as source:
        file = open_quantised(open_safetensors(source), _text(form))
        before = source.bytes_read
        read_matrix(file, "m.weight", (100, 116))
        # And what stands once for the whole matrix: its shape, a table, maxima or a description.
        once = {"int4": 16, "fp8-rows": 4 * 240, "nf4": 4 * 16 + 4 * 256 + 1024}[form]
        assert source.bytes_read - before <= 16 * row_bytes + once


def _text(form: str) -> str:
    return json.dumps(dict(FORMS[form].config))
