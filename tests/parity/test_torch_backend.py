"""The torch executor against the numpy oracle, on random networks with every feature a family may have.

The same checks run on a CUDA device where there is one: there with float32 for closeness, and with bfloat16 for
what must be equal bit by bit (graphs or not, cut or whole, one row or many).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, MixedMatrix
from shardcompute.backends.numpy_ops import NumpyExecutor
from shardcompute.core.batch import Segment
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import Experts, Layer, ModelSpec, Rope, Stage, cut, whole

torch = pytest.importorskip("torch")
from shardcompute.backends.torch import TorchExecutor  # noqa: E402

CONTEXT = 320
KV_BYTES = 1 << 23
VOCABULARY = 96


def make_spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "family": "test",
        "layers": (Layer(), Layer()),
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "intermediate": 160,
        "vocab_size": VOCABULARY,
        "context_length": CONTEXT,
        "ropes": (Rope(tuple(0.5**i for i in range(16))),),
        "norm_eps": 1e-5,
        "attention_scale": 32**-0.5,
    }
    return ModelSpec(**{**fields, **changes})


SPARSE = (Layer(is_sparse=True), Layer(), Layer(is_sparse=True))
SPECS = {
    "plain": make_spec(),
    "mha": make_spec(kv_heads=4, head_dim=16, attention_scale=0.25, ropes=(Rope((1.0, 0.1, 0.01)),)),
    "odd-head": make_spec(kv_heads=1, head_dim=24, ropes=(Rope(tuple(0.6**i for i in range(12)), 1.2),)),
    "head-norm": make_spec(qk_norm="head", has_qkv_bias=True),
    "width-norm": make_spec(qk_norm="width", norm_placement="after"),
    "gemma": make_spec(
        norm_placement="around",
        activation="gelu_tanh",
        embedding_scale=8.0,
        attention_softcap=3.0,
        logit_softcap=2.0,
        layers=(Layer(window=5), Layer(rope=None), Layer(window=70)),
    ),
    "biases": make_spec(has_qkv_bias=True, has_out_bias=True, has_mlp_bias=True, activation="gelu"),
    "dense-sinks": make_spec(has_sinks=True, layers=(Layer(window=9), Layer())),
    "sinks": make_spec(
        has_sinks=True,
        layers=(Layer(window=9, is_sparse=True), Layer(is_sparse=True)),
        experts=Experts(4, 2, 48, has_bias=True, swiglu_limit=1.0),
    ),
    "sparse": make_spec(layers=SPARSE, experts=Experts(5, 3, 40, weights_over="all")),
}
DENSE = [name for name, spec in SPECS.items() if spec.experts is None]


class RandomSource:
    """Tensors made up from their names, in the asked form."""

    def __init__(self, spec: ModelSpec, form: str = "dense") -> None:
        self._spec = spec
        self._form = form

    def matrix(self, name: str, layer: int | None = None) -> Any:
        shape = _matrix_shape(self._spec, name)
        chance = _chance(name, layer)
        if self._form == "dense" or name == "embedding":
            return DenseMatrix((chance.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32))
        return _quantised(shape, chance, self._form)

    def vector(self, name: str, layer: int | None = None) -> Any:
        spread, centre = (0.3, 1.0) if name.endswith("norm") else (0.5, 0.0)
        values = _chance(name, layer).standard_normal(_vector_width(self._spec, name)) * spread + centre
        return values.astype(np.float32)


def _chance(name: str, layer: int | None) -> np.random.Generator:
    return np.random.default_rng([*name.encode(), 0 if layer is None else layer + 1])


def _matrix_shape(spec: ModelSpec, name: str) -> tuple[int, int]:
    q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inner = spec.intermediate
    if name.startswith("experts.") and spec.experts is not None:
        inner = spec.experts.intermediate
    shapes = {
        "embedding": (spec.vocab_size, spec.hidden),
        "head": (spec.vocab_size, spec.hidden),
        "q": (q_width, spec.hidden),
        "k": (kv_width, spec.hidden),
        "v": (kv_width, spec.hidden),
        "out": (spec.hidden, q_width),
        "gate": (inner, spec.hidden),
        "up": (inner, spec.hidden),
        "down": (spec.hidden, inner),
        "router": (0 if spec.experts is None else spec.experts.count, spec.hidden),
    }
    return shapes[name.rsplit(".", 1)[-1]]


def _vector_width(spec: ModelSpec, name: str) -> int:
    if name.endswith(".bias"):
        return _matrix_shape(spec, name.removesuffix(".bias"))[0]
    if name == "attention.sinks":
        return spec.heads
    if name in ("attention.q_norm", "attention.k_norm"):
        if spec.qk_norm == "head":
            return spec.head_dim
        return spec.head_dim * (spec.heads if name == "attention.q_norm" else spec.kv_heads)
    return spec.hidden


def _quantised(shape: tuple[int, int], chance: np.random.Generator, form: str) -> Any:
    bits, size = (4, 32) if "int4" in form else (8, 16)
    blocks = shape[1] // size
    matrix = BlockMatrix(
        bits=bits,
        block_size=size,
        codes=chance.integers(0, 256, (shape[0], blocks, size * bits // 8), dtype=np.uint8),
        scales=(chance.random((shape[0], blocks)) * shape[1] ** -0.5 / (1 << (bits - 2))).astype(np.float32),
        shifts=(chance.standard_normal((shape[0], blocks)) * 0.01).astype(np.float32)
        if "shift" in form
        else None,
    )
    if "mixed" not in form:
        return matrix
    columns = chance.choice(shape[1], 3, replace=False).astype(np.int64)
    return MixedMatrix(matrix, columns, (chance.standard_normal((shape[0], 3)) * 0.1).astype(np.float16))


def make(
    spec: ModelSpec, stage: Stage | None = None, form: str = "dense", device: str = "cpu", **options: Any
) -> TorchExecutor:
    chosen = ExecutorOptions(kv_bytes=KV_BYTES, context_length=CONTEXT, device=device, **options)
    return TorchExecutor(Decoder(spec, stage or whole(spec), RandomSource(spec, form)), chosen)


def oracle(spec: ModelSpec, form: str = "dense") -> NumpyExecutor:
    network = Decoder(spec, whole(spec), RandomSource(spec, form))
    return NumpyExecutor(network, ExecutorOptions(kv_bytes=KV_BYTES, context_length=CONTEXT))


STEPS: Sequence[Sequence[Segment]] = (
    [Segment(1, 0, 7, 1)],
    [Segment(2, 0, 90, 2), Segment(1, 7, 1, 1)],
    [Segment(1, 8, 1, 1), Segment(2, 90, 3, 3)],
    [Segment(2, 80, 1, 1), Segment(3, 0, 20, 20), Segment(1, 4, 5, 5)],
    [Segment(2, 81, 1, 1), Segment(3, 20, 1, 1), Segment(1, 9, 1, 1)],
    [Segment(2, 82, 40, 0), Segment(3, 21, 18, 1)],
    [Segment(2, 122, 1, 1)],
)


def ids_of(segments: Sequence[Segment]) -> Any:
    ids = [(s.session * 31 + i * 7 + i * i) % VOCABULARY for s in segments for i in range(s.start, s.stop)]
    return np.asarray(ids, dtype=np.int64)


def run_all(executor: Any, steps: Sequence[Sequence[Segment]] = STEPS) -> list[Any]:
    return [np.array(executor.step(segments, ids_of(segments))) for segments in steps]


def run_chain(stages: Sequence[Any]) -> list[Any]:
    results = []
    for segments in STEPS:
        x = ids_of(segments)
        for stage in stages:
            x = np.array(stage.step(segments, x))
        results.append(x)
    return results


def assert_close(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SPECS)
def test_every_feature_as_the_oracle_computes_it(name: str) -> None:
    assert_close(run_all(make(SPECS[name])), run_all(oracle(SPECS[name])), 2e-4)


@pytest.mark.parametrize("form", ["int8", "int4", "int4-shift", "int8-mixed", "int4-shift-mixed"])
def test_quantised_weights_as_the_oracle_computes_them(form: str) -> None:
    spec = make_spec(has_qkv_bias=True)
    assert_close(run_all(make(spec, form=form)), run_all(oracle(spec, form)), 2e-4)


@pytest.mark.parametrize("name", ["plain", "gemma", "sinks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cut_model_computes_the_same_bits(name: str, dtype: str) -> None:
    spec = SPECS[name]
    stages = [make(spec, stage, dtype=dtype) for stage in cut(spec, spec.layer_count)]
    for a, b in zip(run_chain(stages), run_all(make(spec, dtype=dtype)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_stays_near_the_oracle() -> None:
    assert_close(run_all(make(SPECS["plain"], dtype="bfloat16")), run_all(oracle(SPECS["plain"])), 0.1)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_cuda_as_the_oracle_computes_it(name: str, use_graphs: bool) -> None:
    ours = make(SPECS[name], device="cuda", dtype="float32", use_graphs=use_graphs)
    assert_close(run_all(ours), run_all(oracle(SPECS[name])), 2e-4)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", DENSE)  # rounding may send a row to another expert
def test_cuda_bfloat16_stays_near_the_oracle(name: str) -> None:
    ours = run_all(make(SPECS[name], device="cuda", dtype="bfloat16"))
    for a, b in zip(ours, run_all(oracle(SPECS[name])), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("form", ["int8", "int4", "int4-shift", "int8-mixed", "int4-shift-mixed"])
def test_cuda_quantised_stays_near_the_oracle(form: str) -> None:
    spec = make_spec(has_qkv_bias=True)
    ours = run_all(make(spec, form=form, device="cuda", dtype="bfloat16"))
    for a, b in zip(ours, run_all(oracle(spec, form)), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", DENSE)
def test_graphs_change_no_bit(name: str) -> None:
    plain = run_all(make(SPECS[name], device="cuda", use_graphs=False))
    for a, b in zip(run_all(make(SPECS[name], device="cuda", use_graphs=True)), plain, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["plain", "gemma", "sinks"])
def test_a_cut_model_computes_the_same_bits_on_cuda(name: str) -> None:
    spec = SPECS[name]
    stages = [make(spec, stage, device="cuda") for stage in cut(spec, spec.layer_count)]
    for a, b in zip(run_chain(stages), run_all(make(spec, device="cuda")), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@needs_cuda
def test_rows_do_not_depend_on_their_batch() -> None:
    spec = dataclasses.replace(SPECS["head-norm"], hidden=256, intermediate=512)
    together, alone = make(spec, device="cuda"), make(spec, device="cuda")
    prompts = [Segment(session, 0, 150 + session, 1) for session in range(10)]
    for prompt in prompts:
        run_all(together, [[prompt]])
        run_all(alone, [[prompt]])
    nexts = [Segment(p.session, p.stop, 1, 1) for p in prompts]
    joint = run_all(together, [nexts])[0]
    single = np.concatenate(run_all(alone, [[segment] for segment in nexts]))
    np.testing.assert_array_equal(joint, single)


@pytest.mark.gpu
@needs_cuda
def test_verifying_a_draft_is_decoding() -> None:
    spec = SPECS["gemma"]
    at_once, by_one = make(spec, device="cuda"), make(spec, device="cuda")
    prompt = Segment(1, 0, 130, 1)
    run_all(at_once, [[prompt]])
    run_all(by_one, [[prompt]])
    verified = run_all(at_once, [[Segment(1, 130, 6, 6)]])[0]
    decoded = np.concatenate(run_all(by_one, [[Segment(1, 130 + i, 1, 1)] for i in range(6)]))
    np.testing.assert_array_equal(verified, decoded)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("use_graphs", [False, True])
def test_a_session_that_begins_with_another_s_memory_on_cuda(is_moved: bool, use_graphs: bool) -> None:
    executor = make(next(iter(SPECS.values())), device="cuda", use_graphs=use_graphs)
    ids = np.arange(100) % VOCABULARY
    for session in (1, 2):
        executor.step([Segment(session, 0, 70, 1)], ids[:70])
    expected = np.array(executor.step([Segment(1, 70, 30, 1)], ids[70:]))
    executor.step([Segment(2, 70, 20, 1)], ids[10:30])
    executor.adopt(2, 3, 70, is_moved=is_moved)
    assert (2 in executor.sessions()) is not is_moved
    assert np.array_equal(executor.step([Segment(3, 70, 30, 1)], ids[70:]), expected)


@pytest.mark.gpu
@needs_cuda
def test_hidden_states_on_cuda() -> None:
    spec = next(iter(SPECS.values()))
    ours, theirs = make(spec, device="cuda", dtype="float32"), oracle(spec)
    segments, ids = [Segment(1, 0, 9, 3)], np.arange(9) % VOCABULARY
    for executor in (ours, theirs):
        executor.step(segments, ids, keeps_hidden=True)
    assert_close([ours.hidden_rows()], [theirs.hidden_rows()], 1e-3)
