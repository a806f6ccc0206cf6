"""Models as they are served: packed once, read by rows, the same matrices as converted on the spot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Matrix, MixedMatrix
from shardcompute.core.errors import CorruptModelError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.models.layout import TOWER, Layout, TensorPlace
from shardcompute.models.spec import Stage, whole
from shardcompute.models.tensor_share import TensorCut
from shardcompute.weights import served as served_module
from shardcompute.weights.card import decode_card, encode_card
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.quantise import convert
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.loader import ShardTensors
from shardcompute.weights.pack import PackedTensors, PackWriter
from shardcompute.weights.served import prepare_served, shard_source
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import save_tiny
from support.seeing.tiny_seeing import save_seeing


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def provide(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return provide


@contextmanager
def _opened(folder: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(folder))) as checkpoint:
        yield checkpoint


def _parts(matrix: Matrix) -> list[Any]:
    if isinstance(matrix, DenseMatrix):
        return [matrix.values]
    if isinstance(matrix, BlockMatrix):
        return [matrix.bits, matrix.block_size, matrix.codes, matrix.scales, matrix.shifts]
    return [*_parts(matrix.blocks), matrix.columns, matrix.values]


def _assert_same(a: Matrix, b: Matrix) -> None:
    assert type(a) is type(b)
    for left, right in zip(_parts(a), _parts(b), strict=True):
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right


def _assert_same_source(packed: Any, local: ShardTensors, layout: Layout) -> None:
    for layer, places in [(None, layout.model), *enumerate(layout.layers)]:
        for name, place in places.items():
            if len(place.shape) == 2:
                _assert_same(packed.matrix(name, layer), local.matrix(name, layer))
            else:
                np.testing.assert_array_equal(packed.vector(name, layer), local.vector(name, layer))


FAMILIES = ["llama-tied", "llama-biases", "phi3", "gemma2", "gpt-oss", "qwen3-moe-mixed"]


@pytest.mark.parametrize("form", ["int8", "int4", "mixed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_packed_is_what_would_be_converted(
    tiny: Callable[[str], Path], tmp_path: Path, name: str, form: str
) -> None:
    with _opened(tiny(name)) as checkpoint:
        served = prepare_served(checkpoint, form, tmp_path)
        card = decode_card(encode_card(served.card))
        source = shard_source(card, served.tensors, whole(card.spec))
        local = ShardTensors(checkpoint.tensors, checkpoint.layout, form=form)
        assert card.kind == "packed"
        _assert_same_source(source, local, checkpoint.layout)
        assert card.stage_bytes(whole(card.spec)) < 0.5 * checkpoint.stage_bytes(whole(card.spec))
        served.tensors.close()


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_a_tower_is_packed_as_its_file_has_it(tmp_path: Path, name: str) -> None:
    with _opened(save_seeing(name, tmp_path / "model")) as checkpoint:
        served = prepare_served(checkpoint, "int8", tmp_path)
        card = decode_card(encode_card(served.card))
        assert (card.kind, card.spec) == ("packed", checkpoint.spec)
        source = shard_source(card, served.tensors, whole(card.spec))
        native = ShardTensors(checkpoint.tensors, checkpoint.layout)
        tower = [each for each in checkpoint.layout.model if each.startswith(TOWER)]
        for each in tower:
            if len(checkpoint.layout.model[each].shape) == 2:
                _assert_same(source.matrix(each), native.matrix(each))
            else:
                np.testing.assert_array_equal(source.vector(each), native.vector(each))
        last = set(card.stage_tensors(Stage(1, 3, 3)))
        assert set(tower) <= set(card.stage_tensors(Stage(0, 1, 3)))
        assert not last & set(tower)
        assert card.stage_bytes(Stage(0, 1, 3)) == card.layer_bytes(0) + card.embedding_bytes
        served.tensors.close()


def test_a_card_whose_tower_cannot_be_is_refused(tmp_path: Path) -> None:
    with _opened(save_seeing("qwen2_vl", tmp_path / "model")) as checkpoint:
        served = prepare_served(checkpoint, "native", tmp_path)
        vision, spec, layout = served.card.spec.vision, served.card.spec, served.card.layout
        assert vision is not None
        wrong = [
            replace(vision, **each)
            for each in ({"patch": 0}, {"heads": 3}, {"layers": 1 << 40}, {"merge": 3})
        ]
        cards = [replace(served.card, spec=replace(spec, vision=each)) for each in wrong]
        without = {name: place for name, place in layout.model.items() if name != f"{TOWER}patch"}
        cards.append(replace(served.card, layout=replace(layout, model=without)))
        for card in cards:
            with pytest.raises(CorruptModelError, match="tower"):
                decode_card(encode_card(card))


@pytest.mark.parametrize("form", ["native", "float32"])
def test_forms_that_shrink_nothing_are_served_as_they_are(
    tiny: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    with _opened(tiny("llama-tied")) as checkpoint:
        served = prepare_served(checkpoint, form, tmp_path)
        assert served.tensors is checkpoint.tensors
        source = shard_source(served.card, served.tensors, whole(served.card.spec))
        local = ShardTensors(checkpoint.tensors, checkpoint.layout, form=form)
        _assert_same_source(source, local, checkpoint.layout)
    assert not list(tmp_path.iterdir())


def test_a_tied_head_is_packed_once(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with _opened(tiny("llama-tied")) as checkpoint:
        served = prepare_served(checkpoint, "int8", tmp_path)
        assert "embedding#codes" in served.card.entries
        assert "head#codes" not in served.card.entries
        served.tensors.close()


class _Counter:
    def __init__(self) -> None:
        self.total = self.done = self.tasks = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        self.total, self.tasks = total_bytes or 0, self.tasks + 1

    def advance(self, count_bytes: int) -> None:
        self.done += count_bytes

    def finish(self) -> None:
        pass


def test_a_packed_file_is_made_once_and_again_if_it_is_damaged(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    progress = _Counter()
    with _opened(tiny("llama-tied")) as checkpoint:
        first = prepare_served(checkpoint, "int8", tmp_path, progress)
        assert (progress.tasks, progress.done) == (1, progress.total)
        second = prepare_served(checkpoint, "int8", tmp_path, progress)
        assert progress.tasks == 1
        assert second.card == first.card
        (path,) = tmp_path.glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
        third = prepare_served(checkpoint, "int8", tmp_path, progress)
        assert progress.tasks == 2
        assert third.card == first.card
        for each in (first, second, third):
            each.tensors.close()
    assert sorted(each.suffix for each in tmp_path.iterdir() if each.is_file()) == [".safetensors"]


def test_nothing_is_left_of_a_packing_that_fails(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PackWriter, metadata: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(PackWriter, "finish", fail)
    with _opened(tiny("llama-tied")) as checkpoint, pytest.raises(OSError, match="no"):
        prepare_served(checkpoint, "int8", tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_other_weights_of_the_same_shapes_are_other_models(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny("llama-tied"), tmp_path / "tuned")
    with _opened(folder) as checkpoint:
        before = prepare_served(checkpoint, "native", tmp_path).card
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with _opened(folder) as checkpoint:
        after = prepare_served(checkpoint, "native", tmp_path).card
    assert before.fingerprint != after.fingerprint


def test_a_form_nobody_knows_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with _opened(tiny("llama-tied")) as checkpoint, pytest.raises(UsageError, match="int3"):
        prepare_served(checkpoint, "int3", tmp_path)


# Tensor ranks


def _packed(folder: Path, form: str) -> tuple[PackedTensors, Matrix, Any]:
    """A packed matrix of 64×128, and the whole of it."""
    values = np.random.default_rng(3).standard_normal((64, 128), dtype=np.float32)
    whole_matrix = convert(DenseMatrix(values), form)
    path = folder / f"{form}.safetensors"
    with PackWriter(path, ["head"]) as writer:
        writer.add_matrix("head", whole_matrix)
        writer.finish({})
    file = open_safetensors(LocalBytes(path))
    return PackedTensors(file, Layout({"head": TensorPlace("head", (64, 128))}, ())), whole_matrix, file


@pytest.mark.parametrize("form", ["float32", "int8", "int4", "mixed"])
@pytest.mark.parametrize("cut", [TensorCut((5, 40)), TensorCut(None, (32, 96)), TensorCut((0, 9), (16, 48))])
def test_ranks_read_their_part_of_a_packed_matrix(tmp_path: Path, form: str, cut: TensorCut) -> None:
    tensors, matrix, file = _packed(tmp_path, form)
    part = tensors.part("head", None, cut).to_dense()
    expected = matrix.to_dense()[slice(*(cut.rows or (0, 64))), slice(*(cut.columns or (0, 128)))]
    np.testing.assert_array_equal(part, expected)
    file.close()


def test_a_rank_reads_no_more_than_its_rows(tmp_path: Path) -> None:
    tensors, matrix, file = _packed(tmp_path, "int8")
    before = file._source.bytes_read
    part = tensors.part("head", None, TensorCut((32, 64)))
    assert file._source.bytes_read - before == part.size_bytes == matrix.size_bytes // 2
    file.close()


@pytest.mark.parametrize(
    "parts",
    [
        {"codes": np.zeros((64, 4, 31), np.uint8), "scales": np.zeros((64, 4), np.float32)},
        {"codes": np.zeros((63, 4, 32), np.uint8), "scales": np.zeros((63, 4), np.float32)},
        {"codes": np.zeros((64, 4, 32), np.uint8), "scales": np.zeros((63, 4), np.float32)},
        {"codes": np.zeros((64, 4, 32), np.uint8), "scales": np.zeros((64, 4), np.float16)},
        {
            "codes": np.zeros((64, 4, 32), np.uint8),
            "scales": np.zeros((64, 4), np.float32),
            "columns": np.array([128]),
            "values": np.zeros((64, 1), np.float16),
        },
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    path = tmp_path / "wrong.safetensors"
    with PackWriter(path, ["head"]) as writer:
        for name, values in parts.items():
            writer.add(f"head#{name}", values)
        writer.finish({})
    file = open_safetensors(LocalBytes(path))
    source = PackedTensors(file, Layout({"head": TensorPlace("head", (64, 128))}, ()))
    with pytest.raises(CorruptModelError, match="head"):
        source.matrix("head")
    file.close()


def test_a_mixed_matrix_keeps_each_ranks_own_columns(tmp_path: Path) -> None:
    tensors, matrix, file = _packed(tmp_path, "mixed")
    assert isinstance(matrix, MixedMatrix)
    halves = [tensors.part("head", None, TensorCut(None, each)) for each in ((0, 64), (64, 128))]
    columns = [
        half.columns + 64 * index for index, half in enumerate(halves) if isinstance(half, MixedMatrix)
    ]
    np.testing.assert_array_equal(np.concatenate(columns), matrix.columns)
    file.close()


def test_a_full_disk_is_noticed_before_anything_is_written(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(served_module, "check_room", lambda folder, needed, what: asked.append(needed))
    with _opened(tiny("llama-tied")) as checkpoint:
        served = prepare_served(checkpoint, "int8", tmp_path)
        size = sum(entry.size_bytes for entry in served.card.entries.values())
        assert 0.8 * size < asked[0] < 1.2 * size
        served.tensors.close()
