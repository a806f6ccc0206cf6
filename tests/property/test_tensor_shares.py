"""Whatever heads, columns, experts and speeds there are: every part of a model is some rank's, and none is two's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Matrix, MixedMatrix
from shardcompute.collectives import FabricGroup, run_ranks, thread_groups
from shardcompute.core.batch import Segment
from shardcompute.models.families.places import layer_slots, model_slots
from shardcompute.models.rank_tensors import RankTensors
from shardcompute.models.spec import Experts, Layer, ModelSpec, whole
from shardcompute.models.tensor_share import (
    ExpertCut,
    Span,
    TensorSplit,
    cut_of,
    rank_spec,
    split_tensors,
    tensor_cuts,
)
from shardcompute.runtime.shard import build_executor
from shardcompute.runtime.tensor_stage import join_ranks

WEIGHTS = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    kv_heads, group = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    experts = None
    if draw(st.booleans()):
        experts = Experts(
            count=draw(st.integers(8, 16)),
            per_token=2,
            intermediate=32 * draw(st.integers(6, 9)),
            has_bias=draw(st.booleans()),
            shared_intermediate=draw(st.sampled_from((0, 256))),
        )
    return ModelSpec(
        family="any",
        layers=(Layer(is_sparse=experts is not None),),
        hidden=32 * draw(st.integers(1, 4)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=16,
        intermediate=32 * draw(st.integers(1, 40)),
        vocab_size=draw(st.integers(6, 300)),
        context_length=64,
        ropes=(),
        norm_eps=1e-5,
        attention_scale=1.0,
        has_qkv_bias=draw(st.booleans()),
        has_out_bias=draw(st.booleans()),
        has_mlp_bias=draw(st.booleans()),
        has_sinks=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(("none", "head", "width"))),
        has_gate=draw(st.booleans()),
        experts=experts,
    )


def _covers(spans: Sequence[Span], total: int) -> bool:
    """Whether the ranges lie one behind the other, none empty, from 0 to `total`."""
    edges = [0, *(stop for _, stop in spans)]
    return (
        [start for start, _ in spans] == edges[:-1]
        and edges[-1] == total
        and all(a < b for a, b in itertools.pairwise(edges))
    )


@given(
    spec=specs(),
    weights=WEIGHTS,
    block=st.sampled_from((1, 32, 64)),
    by=st.sampled_from(("columns", "experts")),
)
def test_every_part_is_held_once(spec: ModelSpec, weights: list[float], block: int, by: ExpertCut) -> None:
    assume(spec.heads >= len(weights) and spec.intermediate // 16 >= len(weights))
    split = split_tensors(spec, weights, block=block, experts_by=by)
    shares = split.shares
    assert _covers([share.heads for share in shares], spec.heads)
    assert _covers([share.columns for share in shares], spec.intermediate)
    assert _covers([share.vocabulary for share in shares], spec.vocab_size)
    assert _covers([share.hidden for share in shares], spec.hidden)
    if spec.kv_heads >= len(weights):
        assert _covers([share.kv_heads for share in shares], spec.kv_heads)
    for share in shares:
        own = rank_spec(spec, share)
        assert own.heads % own.kv_heads == 0
        for index, head in enumerate(range(*share.heads)):
            kept = share.kv_heads[0] + index // own.group
            assert kept == head // spec.group, "a query meets the keys that it meets in one process"
    if spec.experts is not None:
        inner = [share.experts if by == "experts" else share.expert_columns for share in shares]
        assert _covers(inner, spec.experts.count if by == "experts" else spec.experts.intermediate)


@given(spec=specs(), ranks=st.integers(2, 4))
def test_columns_are_even_where_heads_cannot_be(spec: ModelSpec, ranks: int) -> None:
    """Ranks meet behind attention and behind columns: the longest of each is waited for."""
    assume(spec.heads >= ranks and spec.intermediate // 32 >= ranks)
    widths = [
        stop - start
        for start, stop in (s.columns for s in split_tensors(spec, [1.0] * ranks, block=32).shares)
    ]
    assert max(widths) - min(widths) <= 32


@given(spec=specs(), weights=WEIGHTS)
def test_cuts_are_the_shapes_of_a_ranks_own_model(spec: ModelSpec, weights: list[float]) -> None:
    """What is cut of each tensor of the model has the shape that a model as small as the rank's has."""
    assume(spec.heads >= len(weights) and spec.intermediate // 16 >= len(weights))
    split = split_tensors(spec, weights, block=32)
    for share in split.shares:
        cuts, own = tensor_cuts(spec, share, "reduce"), rank_spec(spec, share)
        wanted = {slot.name: slot.shape for slot in layer_slots(own, 0)}
        for slot in layer_slots(spec, 0):
            cut = cut_of(cuts, slot.name)
            shape = list(slot.shape)
            for axis, span in enumerate((cut.rows, cut.columns)):
                if span is not None:
                    shape[axis] = span[1] - span[0]
            is_whole = spec.qk_norm == "width" and slot.matrix in (
                "attention.q",
                "attention.k",
                "attention.q_norm",
                "attention.k_norm",
            )
            assert tuple(shape) == (slot.shape if is_whole else wanted[slot.name])


class _RandomTensors:
    """A model's tensors, each the same whenever it is asked for: dense, in blocks, or blocks with outliers."""

    def __init__(self, spec: ModelSpec, kind: str) -> None:
        slots = [*layer_slots(spec, 0), *model_slots(spec)]
        self._shapes = {slot.name: slot.shape for slot in slots}
        self._kind = kind

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        rows, columns = self._shapes[name]
        noise = np.random.default_rng(len(name))
        if self._kind in ("dense", "small") or columns % 32:
            scale = np.float32(1.0 if self._kind == "dense" else columns**-0.5)
            return DenseMatrix(scale * noise.standard_normal((rows, columns), dtype=np.float32))
        bits = 4 if self._kind == "int4" else 8
        shape = (rows, columns // 32)
        blocks = BlockMatrix(
            bits,
            32,
            noise.integers(0, 256, (*shape, 32 * bits // 8), dtype=np.uint8),
            noise.random(shape, dtype=np.float32),
            noise.random(shape, dtype=np.float32) if self._kind == "int4" else None,
        )
        if self._kind != "mixed":
            return blocks
        loud = np.sort(noise.choice(columns, 3, replace=False))
        return MixedMatrix(blocks, loud, noise.random((rows, 3)).astype(np.float16))

    def vector(self, name: str, layer: int | None = None) -> np.ndarray:
        return np.random.default_rng(len(name)).standard_normal(self._shapes[name], dtype=np.float32)


@given(spec=specs(), weights=WEIGHTS, kind=st.sampled_from(("dense", "int8", "int4", "mixed")))
def test_ranks_together_compute_the_block_of_one(spec: ModelSpec, weights: list[float], kind: str) -> None:
    """Linear maps alone, exactly enough to see a weight that is missing, rounded or counted twice."""
    assume(spec.heads >= len(weights) and spec.intermediate // 16 >= len(weights) and spec.experts is None)
    split = split_tensors(spec, weights, block=32)
    source = _RandomTensors(spec, kind)
    x = np.random.default_rng(1).integers(-3, 4, (2, spec.hidden)).astype(np.float64)
    whole = _block(source, x, spec)
    parts = [_block(RankTensors(source, spec, split, rank), x, spec) for rank in range(split.size)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-9, atol=1e-6)
    _check_heads(split, source, spec)


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelSpec, TensorSplit]:
    """Models of any numbers of heads, and ranks of any speeds, in a line or as a grid."""
    kv_heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    spec = ModelSpec(
        family="any",
        layers=(Layer(rope=None), Layer(rope=None)),
        hidden=32 * draw(st.integers(1, 3)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=16,
        intermediate=16 * draw(st.integers(4, 9)),
        vocab_size=draw(st.integers(8, 70)),
        context_length=64,
        ropes=(),
        norm_eps=1e-5,
        attention_scale=0.25,
        has_qkv_bias=draw(st.booleans()),
        has_out_bias=draw(st.booleans()),
        has_mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(("none", "head", "width"))),
        has_gate=draw(st.booleans()),
    )
    grid = draw(st.sampled_from((None, None, (2, 2), (1, 2), (2, 1))))
    ranks = draw(st.integers(1, min(4, spec.heads))) if grid is None else grid[0] * grid[1]
    assume(spec.heads >= (ranks if grid is None else grid[0]))
    weights = draw(st.lists(st.floats(0.2, 5.0), min_size=ranks, max_size=ranks))
    exchange = "reduce" if grid else draw(st.sampled_from(("reduce", "gather")))
    return spec, split_tensors(spec, weights, block=16, exchange=exchange, grid=grid)


@settings(max_examples=25, deadline=None)
@given(model=splits())
def test_ranks_together_have_the_logits_of_one(model: tuple[ModelSpec, TensorSplit]) -> None:
    """The oracle, whole layers with attention: whatever the numbers of heads and the speeds of ranks."""
    spec, split = model
    source, stage = _RandomTensors(spec, "small"), whole(spec)
    options = ExecutorOptions(kv_bytes=1 << 20, max_rows=8, context_length=64)
    segments, ids = [Segment(1, 0, 5, 5)], np.arange(5) % spec.vocab_size

    def logits(group: FabricGroup | None) -> np.ndarray:
        rank = None if group is None else join_ranks(spec, split, group)
        executor = build_executor(spec, stage, source, backend="numpy", options=options, rank=rank)
        return np.array(executor.step(segments, ids))

    parts = run_ranks(thread_groups(split.size), logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=-1), logits(None), atol=1e-5)


def _block(source: _RandomTensors | RankTensors, x: np.ndarray, spec: ModelSpec) -> np.ndarray:
    def linear(x: np.ndarray, name: str, has_bias: bool) -> np.ndarray:
        y = x @ source.matrix(name, 0).to_dense().T.astype(np.float64)
        return y + source.vector(f"{name}.bias", 0) if has_bias else y

    return linear(linear(x, "mlp.up", spec.has_mlp_bias), "mlp.down", spec.has_mlp_bias)


def _check_heads(split: TensorSplit, source: _RandomTensors, spec: ModelSpec) -> None:
    ranks = [RankTensors(source, spec, split, rank) for rank in range(split.size)]
    outs = [rank.matrix("attention.out", 0).to_dense() for rank in ranks]
    np.testing.assert_array_equal(np.concatenate(outs, axis=1), source.matrix("attention.out").to_dense())
    if spec.qk_norm != "width":
        queries = [rank.matrix("attention.q", 0).to_dense() for rank in ranks]
        np.testing.assert_array_equal(np.concatenate(queries), source.matrix("attention.q").to_dense())
    heads = [rank.matrix("head").to_dense() for rank in ranks]
    np.testing.assert_array_equal(np.concatenate(heads), source.matrix("head").to_dense())
