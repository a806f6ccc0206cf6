"""Random networks with every feature a family may have, ragged steps over them, and the numpy oracle's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.host.numpy_ops import NumpyExecutor
from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, MixedMatrix
from shardcompute.core.batch import Segment
from shardcompute.core.expert_routing import Routing
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import Experts, Growth, LatentAttention, Layer, ModelSpec, Rope, whole
from support.models.networks import latent_shapes

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
    "sparse": make_spec(layers=SPARSE, experts=Experts(5, 3, 40, Routing(weights_over="all"))),
    "grouped": make_spec(
        layers=SPARSE,
        experts=Experts(
            8,
            3,
            40,
            Routing(
                "sigmoid", has_choice_bias=True, groups=4, chosen_groups=2, group_by="best_two", scale=2.5
            ),
            shared_intermediate=96,
        ),
    ),
    "shared-score": make_spec(
        layers=SPARSE,
        experts=Experts(
            6,
            2,
            40,
            Routing(has_choice_bias=True, groups=2, weights_over="all"),
            shared_intermediate=64,
            has_shared_gate=True,
        ),
    ),
    "weighed-input": make_spec(
        layers=SPARSE,
        experts=Experts(4, 1, 40, Routing("sigmoid", "all", weighs_input=True), shared_intermediate=32),
    ),
}
_LATENT = LatentAttention(kv_rank=32, plain=16, rotated=8, value=24, q_rank=48)
_LATENT_SPEC: Mapping[str, Any] = {
    "kv_heads": 1,
    "head_dim": 40,
    "ropes": (Rope(tuple(0.5**i for i in range(4)), 1.1),),
}
LATENT_SPECS = {
    "latent": make_spec(**_LATENT_SPEC, latent=_LATENT),
    "latent-plain-q": make_spec(
        **_LATENT_SPEC,
        latent=replace(_LATENT, q_rank=None, is_interleaved=False),
        layers=SPARSE,
        experts=SPECS["grouped"].experts,
    ),
}
SPECS |= LATENT_SPECS
_GROWN = Rope(tuple(0.5**i for i in range(16)), 1.1, Growth(0.3, 20))
SPECS |= {
    "layer-norm": make_spec(
        norm="layer",
        has_norm_bias=True,
        has_gate=False,
        activation="relu2",
        residual_scale=0.5,
        logit_scale=0.25,
    ),
    "parallel": make_spec(norm="layer", is_parallel=True, layers=(Layer(window=9), Layer(rope=None))),
    "normed-behind": make_spec(qk_norm="head", norms_turned=True),
    "chunked": make_spec(
        qk_norm="unit",
        norms_turned=True,
        layers=(Layer(chunk=37), Layer(rope=None, query_rope=1), Layer(query_rope=2)),
        ropes=(*make_spec().ropes, Rope((0.0,) * 16, 1.0, Growth(0.3, 20, 1)), _GROWN),
    ),
}
FORMS = ("int8", "int4", "int4-shift", "int8-mixed", "int4-shift-mixed")
DENSE = [name for name, spec in SPECS.items() if spec.experts is None and spec.latent is None]


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
    if spec.latent is not None and name.startswith("attention."):
        return latent_shapes(spec, spec.latent)[name.removeprefix("attention.")]
    q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inner = spec.intermediate
    if name.startswith("experts.") and spec.experts is not None:
        inner = spec.experts.intermediate
    if name.startswith("shared.") and spec.experts is not None:
        inner = spec.experts.shared_intermediate
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
        "shared_score": (1, spec.hidden),
    }
    return shapes[name.rsplit(".", 1)[-1]]


def _vector_width(spec: ModelSpec, name: str) -> int:
    if name.endswith(".bias") and not name.endswith("norm.bias"):
        return _matrix_shape(spec, name.removesuffix(".bias"))[0]
    if name == "attention.sinks":
        return spec.heads
    if spec.latent is not None and name in ("attention.kv_norm", "attention.q_latent_norm"):
        return (spec.latent.kv_rank if name == "attention.kv_norm" else spec.latent.q_rank) or 0
    if name == "mlp.choice_bias" and spec.experts is not None:
        return spec.experts.count
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


def run_chain(stages: Sequence[Any], steps: Sequence[Sequence[Segment]] = STEPS) -> list[Any]:
    results = []
    for segments in steps:
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
