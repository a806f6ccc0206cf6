"""Tensors as a shard gets them: cut for its rank, in the decoder's order, and refused where they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families.places import layer_slots, model_slots
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import Experts, Layer, ModelSpec, Rope
from shardcompute.models.tensor_share import TensorCut
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.gguf_file import open_gguf
from shardcompute.weights.formats.quantise import WEIGHT_FORMS
from shardcompute.weights.formats.tensor_file import TensorFile
from shardcompute.weights.loader import (
    ShardTensors,
    check_stage,
    read_place,
    read_vector_place,
    stage_bytes,
    stored_bytes,
)

RANDOM = np.random.default_rng(5)
TYPES = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0")
# As SmolLM2: 9 heads that share 3 key heads, in small.
SPEC = ModelSpec("llama", (Layer(),) * 2, 288, 9, 3, 32, 320, 50, 64, (Rope((1.0,) * 16),), 1e-5, 32**-0.5)

Tensors = Mapping[str, NDArray[np.float32]]
Write = Callable[..., TensorFile]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes tensors into a GGUF file, all of one type, and opens it."""
    opened: list[TensorFile] = []

    def write_file(tensors: Tensors, dtype: str = "F32") -> TensorFile:
        path = tmp_path / f"{len(opened)}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        kind = gguf.GGMLQuantizationType[dtype]
        for name, values in tensors.items():
            is_plain = values.ndim == 1 or dtype == "F32"
            stored = values if is_plain else gguf.quants.quantize(values, kind)
            writer.add_tensor(name, stored, raw_dtype=None if is_plain else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        opened.append(open_gguf(LocalBytes(path)))
        return opened[-1]

    yield write_file
    for file in opened:
        file.close()


def normal(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def place(name: str) -> TensorPlace:
    """Where a layer's tensor lies when it is stored as it is, under our own name."""
    return next(slot.at(slot.name) for slot in layer_slots(SPEC, 0) if slot.name == name)


def layout_of(spec: ModelSpec) -> Layout:
    return Layout(
        model={slot.name: slot.at(slot.name) for slot in model_slots(spec)},
        layers=tuple(
            {slot.name: slot.at(f"{i}.{slot.name}") for slot in layer_slots(spec, i)}
            for i in range(spec.layer_count)
        ),
    )


def one_layer(place: TensorPlace) -> Layout:
    return Layout({}, ({"mlp.up": place},))


def all_tensors(spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    layout = layout_of(spec)
    return {p.stored: normal(*p.shape) for places in (layout.model, *layout.layers) for p in places.values()}


# Parts of tensor ranks


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("cut", [TensorCut((0, 31)), TensorCut((31, 96)), TensorCut((32, 64), (32, 128))])
def test_a_part_has_the_numbers_of_the_whole(write: Write, dtype: str, form: str, cut: TensorCut) -> None:
    tensors = ShardTensors(
        write({"w": normal(96, 192)}, dtype), one_layer(TensorPlace("w", (96, 192))), form=form
    )
    whole, part = tensors.matrix("mlp.up", 0), tensors.part("mlp.up", 0, cut)
    expected = whole.to_dense()[slice(*(cut.rows or (0, 96))), slice(*(cut.columns or (0, 192)))]
    assert type(part) is type(whole) or isinstance(part, BlockMatrix), (
        "of mixed columns none may be in a part"
    )
    np.testing.assert_array_equal(part.to_dense(), expected)


@pytest.mark.parametrize("form", ["native", "int8", "mixed"])
def test_a_part_of_what_is_stored_in_another_order(write: Write, form: str) -> None:
    """Heads in pairs, every other row, a fused matrix, a stack of experts, and one that is transposed."""
    values, stack = normal(192, 64), normal(3, 64, 64)
    file = write({"w": values, "stack": stack})
    for place in (
        TensorPlace("w", (192, 64), interleaved_head_dim=32),
        TensorPlace("w", (96, 64), every=(1, 2)),
        TensorPlace("w", (96, 64), rows=(64, 160)),
        TensorPlace("stack", (64, 64), expert=2),
        TensorPlace("stack", (64, 64), expert=1, is_transposed=True),
        TensorPlace("stack", (32, 64), expert=1, is_transposed=True, every=(1, 2)),
        TensorPlace("stack", (192, 64), stored_shape=(3, 64, 64)),
    ):
        tensors = ShardTensors(file, one_layer(place), form=form)
        rows, columns = (0, place.shape[0]) if place.stored_shape is None else (64, 128), (32, 64)
        rows = (rows[1] // 2, rows[1]) if place.stored_shape is None else rows
        for cut in (TensorCut(rows), TensorCut(None, columns), TensorCut(rows, columns)):
            expected = tensors.matrix("mlp.up", 0).to_dense()
            expected = expected[slice(*(cut.rows or (0, None))), slice(*(cut.columns or (0, None)))]
            np.testing.assert_array_equal(tensors.part("mlp.up", 0, cut).to_dense(), expected)


def test_a_rank_reads_only_its_rows(write: Write) -> None:
    file = write({"w": normal(288, 288)}, "Q4_1")
    tensors = ShardTensors(file, one_layer(TensorPlace("w", (288, 288))))
    source: LocalBytes = file._source  # type: ignore[attr-defined]
    before = source.bytes_read
    tensors.part("mlp.up", 0, TensorCut((96, 192)))
    assert source.bytes_read - before == file.entries["w"].size_bytes // 3


def test_a_rank_reads_only_its_columns_where_those_are_rows(write: Write) -> None:
    file = write({"w": normal(96, 64)})
    tensors = ShardTensors(file, one_layer(TensorPlace("w", (64, 96), is_transposed=True)))
    source: LocalBytes = file._source  # type: ignore[attr-defined]
    before = source.bytes_read
    tensors.part("mlp.up", 0, TensorCut(None, (32, 64)))
    assert source.bytes_read - before == file.entries["w"].size_bytes // 3


# Orders in which checkpoints store rows


def interleave(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """As llama.cpp's converter writes rotary heads: halves become pairs."""
    halves = values.reshape(len(values) // head_dim, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize("dtype", ["F32", "Q4_1", "Q8_0"])
def test_interleaved_heads_are_put_in_halves(write: Write, dtype: str) -> None:
    values = normal(288, 64)
    file = write({"plain": values, "pairs": interleave(values, 32)}, dtype)
    plain = TensorPlace("plain", (288, 64))
    pairs = replace(plain, stored="pairs", interleaved_head_dim=32)
    for rows in (None, (0, 96), (192, 288)):
        np.testing.assert_array_equal(
            read_place(file, pairs, rows).to_dense(), read_place(file, plain, rows).to_dense()
        )
    is_kept = DenseMatrix if dtype == "F32" else BlockMatrix
    assert isinstance(read_place(file, pairs), is_kept), "rearranging does not round or widen"


def test_interleaved_biases_are_put_in_halves(write: Write) -> None:
    values = normal(288)
    file = write({"pairs": interleave(values, 32)})
    bias = TensorPlace("pairs", (288,), interleaved_head_dim=32)
    np.testing.assert_array_equal(read_vector_place(file, bias), values)


def test_gemmas_norms_get_their_one_back(write: Write) -> None:
    values = normal(64)
    file = write({"norm": values})
    norm = TensorPlace("norm", (64,), plus_one=True)
    np.testing.assert_array_equal(read_vector_place(file, norm), values + np.float32(1))


@pytest.mark.parametrize("dtype", ["F32", "Q4_1"])
def test_parts_of_a_fused_matrix(write: Write, dtype: str) -> None:
    file = write({"qkv": normal(480, 64)}, dtype)
    whole = read_place(file, TensorPlace("qkv", (480, 64))).to_dense()
    key = TensorPlace("qkv", (96, 64), rows=(288, 384))
    np.testing.assert_array_equal(read_place(file, key).to_dense(), whole[288:384])
    np.testing.assert_array_equal(read_place(file, key, (32, 64)).to_dense(), whole[320:352])


def test_experts_of_a_stack(write: Write) -> None:
    file = write({"stack": normal(3, 128, 64)}, "Q8_0")
    whole = np.stack(
        [read_place(file, TensorPlace("stack", (128, 64), expert=e)).to_dense() for e in range(3)]
    )
    assert whole.shape == (3, 128, 64)
    up = TensorPlace("stack", (64, 64), rows=(64, 128), expert=2)
    np.testing.assert_array_equal(read_place(file, up).to_dense(), whole[2, 64:])
    np.testing.assert_array_equal(read_place(file, up, (32, 64)).to_dense(), whole[2, 96:])
    with pytest.raises(CorruptModelError, match="experts 3 to 4"):
        read_place(file, replace(up, expert=3))


@pytest.mark.parametrize("shape", [(4, 32, 64), (128, 64)])
def test_matrices_of_heads_may_be_stacked(write: Write, shape: tuple[int, ...]) -> None:
    file = write({"maps": normal(*shape)}, "Q8_0")
    maps = TensorPlace("maps", (128, 64), stored_shape=(4, 32, 64))
    check_stage(file, Layout({}, ({"maps": maps},)), 0, 1)
    whole = read_place(file, maps).to_dense()
    flat = [read_place(file, TensorPlace("maps", (32, 64), expert=e)) for e in range(4) if shape[0] == 4]
    if flat:
        np.testing.assert_array_equal(whole, np.concatenate([head.to_dense() for head in flat]))
    np.testing.assert_array_equal(read_place(file, maps, (64, 128)).to_dense(), whole[64:])


def test_one_row_may_be_stored_as_a_vector(write: Write) -> None:
    place = TensorPlace("score", (1, 64), stored_shape=(64,))
    values = normal(64)
    for stored in (values, values.reshape(1, 64)):
        file = write({"score": stored})
        check_stage(file, Layout({}, ({"score": place},)), 0, 1)
        np.testing.assert_array_equal(read_place(file, place).to_dense(), values.reshape(1, 64))


@pytest.mark.parametrize("shape", [(3, 32, 64), (4, 64, 32), (4, 32, 63), (8192,)])
def test_a_stack_of_another_shape_is_refused(write: Write, shape: tuple[int, ...]) -> None:
    layout = Layout({}, ({"maps": TensorPlace("maps", (128, 64), stored_shape=(4, 32, 64))},))
    with pytest.raises(CorruptModelError, match="4×32×64"):
        check_stage(write({"maps": normal(*shape)}), layout, 0, 1)


def test_transposed_experts_with_gate_and_up_in_turn(write: Write) -> None:
    """As gpt-oss stores them: `[experts, in, out]`, even columns gate, odd ones up."""
    matrices, biases = normal(2, 48, 64), normal(2, 64)
    file = write({"gate_up": matrices, "bias": biases})
    for offset in (0, 1):
        part = TensorPlace("gate_up", (32, 48), every=(offset, 2), expert=1, is_transposed=True)
        np.testing.assert_array_equal(read_place(file, part).to_dense(), matrices[1].T[offset::2])
        np.testing.assert_array_equal(
            read_place(file, part, None, (24, 48)).to_dense(), matrices[1].T[offset::2][:, 24:]
        )
        bias = TensorPlace("bias", (32,), every=(offset, 2), expert=1)
        np.testing.assert_array_equal(read_vector_place(file, bias), biases[1, offset::2])
    down = TensorPlace("gate_up", (64, 48), expert=0, is_transposed=True)
    np.testing.assert_array_equal(read_place(file, down, None, (24, 48)).to_dense(), matrices[0].T[:, 24:])


def test_quantised_blocks_are_not_rounded_again_to_rearrange_them(write: Write) -> None:
    file = write({"w": normal(64, 64)}, "Q8_0")
    with pytest.raises(UnsupportedModelError, match="cannot be rearranged"):
        read_place(file, TensorPlace("w", (64, 64), is_transposed=True))
    every_other = read_place(file, TensorPlace("w", (32, 64), every=(1, 2)), (16, 32))
    assert isinstance(every_other, BlockMatrix)
    whole = read_place(file, TensorPlace("w", (64, 64))).to_dense()
    np.testing.assert_array_equal(every_other.to_dense(), whole[1::2][16:])


# Forms and sizes


def test_tensors_come_in_the_wanted_form_but_routers_as_they_are(write: Write) -> None:
    spec = replace(SPEC, layers=(Layer(is_sparse=True),), experts=Experts(4, 2, 64))
    layout = layout_of(spec)
    file = write(all_tensors(spec), "Q8_0")
    for form, kind in (("float32", DenseMatrix), ("int8", BlockMatrix), ("native", BlockMatrix)):
        tensors = ShardTensors(file, layout, form=form)
        assert isinstance(tensors.matrix("attention.q", 0), kind)
        router = tensors.matrix("mlp.router", 0)
        assert isinstance(router, DenseMatrix)
        np.testing.assert_array_equal(
            router.to_dense(), read_place(file, layout.layers[0]["mlp.router"]).to_dense()
        )


def test_stages_bytes_add_up_to_the_layers(write: Write) -> None:
    """Whether a tensor is one of ours, one of several of ours, or a stack of experts."""
    spec = replace(SPEC, layers=(Layer(), Layer(is_sparse=True)), experts=Experts(2, 1, 64))
    plain = layout_of(spec)
    stacked = [{name: _stacked(p) for name, p in places.items()} for places in plain.layers]
    layout = replace(plain, layers=tuple(stacked))
    tensors = all_tensors(spec)
    for part, shape in (("gate", (2, 64, 288)), ("up", (2, 64, 288)), ("down", (2, 288, 64))):
        for expert in range(2):
            del tensors[f"1.experts.{expert}.{part}"]
        tensors[f"1.stack.{part}"] = normal(*shape)
    file = write(tensors, "Q4_0")
    sizes = [stage_bytes(file, layout, i, i + 1) for i in range(2)]
    assert sizes[0] + sizes[1] == stage_bytes(file, layout, 0, 2)
    for layer, size in enumerate(sizes):
        stored = [e.size_bytes for name, e in file.entries.items() if name.startswith(f"{layer}.")]
        assert size == sum(stored)
    check_stage(file, layout, 0, 2)


def _stacked(p: TensorPlace) -> TensorPlace:
    layer, *kind = p.stored.split(".")
    if kind[0] != "experts":
        return p
    return replace(p, stored=f"{layer}.stack.{kind[2]}", expert=int(kind[1]))


def test_a_tied_head_is_counted_once(write: Write) -> None:
    layout = layout_of(SPEC)
    file = write(all_tensors(SPEC))
    tied = replace(layout, model={**layout.model, "head": layout.model["embedding"]})
    apart = stored_bytes(ShardTensors(file, layout), layout)
    assert apart - stored_bytes(ShardTensors(file, tied), tied) == 50 * 288 * 4


# Shapes that the config does not call for


def test_shapes_are_checked_before_anything_is_read(write: Write) -> None:
    layout, tensors = layout_of(SPEC), all_tensors(SPEC)
    check_stage(write(tensors), layout, 0, 2)
    for name, shape in [
        ("0.attention.q", (288, 256)),
        ("0.attention.k", (64, 288)),
        ("1.mlp.norm", (287,)),
        ("1.mlp.down", (320, 288)),
        ("embedding", (51, 288)),
        ("norm", (1, 288)),
    ]:
        file = write(tensors | {name: normal(*shape)})
        with pytest.raises(CorruptModelError, match="×".join(map(str, shape))) as raised:
            check_stage(file, layout, 0, 2)
        assert name in raised.value.message


def test_other_stages_tensors_are_not_this_ones_business(write: Write) -> None:
    layout, tensors = layout_of(SPEC), all_tensors(SPEC)
    file = write(tensors | {"1.attention.q": normal(4, 4)})
    check_stage(file, layout, 0, 1)
    with pytest.raises(CorruptModelError, match=r"1\.attention\.q"):
        check_stage(file, layout, 1, 2)


@pytest.mark.parametrize("rows", [384 - 32, 480 + 32])
def test_a_fused_matrix_ends_where_its_last_part_does(write: Write, rows: int) -> None:
    """Too many rows are as wrong as too few: the parts would be cut at the wrong places."""
    parts = {
        "q": TensorPlace("qkv", (288, 64), rows=(0, 288)),
        "k": TensorPlace("qkv", (96, 64), rows=(288, 384)),
        "v": TensorPlace("qkv", (96, 64), rows=(384, 480)),
    }
    layout = Layout({}, (parts,))
    check_stage(write({"qkv": normal(480, 64)}), layout, 0, 1)
    with pytest.raises(CorruptModelError, match="480×64"):
        check_stage(write({"qkv": normal(rows, 64)}), layout, 0, 1)


@pytest.mark.parametrize("shape", [(1, 128, 64), (3, 128, 64), (2, 128, 32), (2, 130, 64), (128, 64)])
def test_a_stack_holds_exactly_the_experts(write: Write, shape: tuple[int, ...]) -> None:
    parts = {
        f"{part}.{expert}": TensorPlace("stack", (64, 64), rows=rows, expert=expert)
        for expert in range(2)
        for part, rows in (("gate", (0, 64)), ("up", (64, 128)))
    }
    layout = Layout({}, (parts,))
    check_stage(write({"stack": normal(2, 128, 64)}), layout, 0, 1)
    with pytest.raises(CorruptModelError, match="2×128×64"):
        check_stage(write({"stack": normal(*shape)}), layout, 0, 1)


def test_a_tensor_that_is_not_there_is_named(write: Write) -> None:
    layout, tensors = layout_of(SPEC), all_tensors(SPEC)
    del tensors["1.attention.v"]
    file = write(tensors)
    with pytest.raises(CorruptModelError, match=r"1\.attention\.v"):
        check_stage(file, layout, 0, 2)
    with pytest.raises(CorruptModelError, match=r"1\.attention\.v"):
        ShardTensors(file, layout).matrix("attention.v", 1)
