"""Models for tests that only count bytes: one of round numbers, and one that tensor ranks can divide."""

from __future__ import annotations

from dataclasses import replace as replace_fields

from msgspec.structs import replace

from shardcompute.control import Model
from shardcompute.control.sizes import layer_work, tensor_terms
from shardcompute.models.spec import Layer, ModelSpec

_PLAIN = Model(
    name="m",
    layer_bytes=(100,) * 6,
    embedding_bytes=50,
    head_bytes=50,
    kv_bytes_per_token_and_layer=1,
    kv_tokens=10,
    hidden=8,
    context_length=64,
    weight_form="int8",
)


def plain_model(**changes: object) -> Model:
    return replace(_PLAIN, **changes)


LAYERS = 22
SPEC = ModelSpec(
    family="llama",
    layers=(Layer(),) * LAYERS,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=64,
    intermediate=5632,
    vocab_size=32000,
    context_length=2048,
    ropes=(),
    norm_eps=1e-5,
    attention_scale=0.125,
)
_LAYER_BYTES = (28_000_000,) * LAYERS


def small_model() -> Model:
    """Of the default model's shape, which is small: 135M weights, 9 heads that two ranks cannot halve."""
    spec = replace_fields(
        SPEC, layers=(Layer(),) * 30, hidden=576, heads=9, kv_heads=3, intermediate=1536, vocab_size=49152
    )
    layer_bytes = (2_200_000,) * 30
    return ranked_model(
        layer_bytes=layer_bytes,
        work_bytes=layer_work(spec, layer_bytes),
        embedding_bytes=30_000_000,
        head_bytes=30_000_000,
        kv_bytes_per_token_and_layer=spec.kv_bytes_per_token_and_layer(),
        hidden=spec.hidden,
        tensor=tensor_terms(spec, lambda: 32),
    )


def ranked_model(heads: int = 32, kv_heads: int = 4, **changes: object) -> Model:
    """Layers of width 2048 in 4-bit blocks, as `bench tensor --shape 1.1b` has them."""
    spec = replace_fields(SPEC, heads=heads, kv_heads=kv_heads)
    found = Model(
        name="m",
        layer_bytes=_LAYER_BYTES,
        work_bytes=layer_work(spec, _LAYER_BYTES),
        embedding_bytes=40_000_000,
        head_bytes=40_000_000,
        kv_bytes_per_token_and_layer=spec.kv_bytes_per_token_and_layer(),
        kv_tokens=2048,
        hidden=spec.hidden,
        context_length=2048,
        weight_form="int4",
        tensor=tensor_terms(spec, lambda: 32),
    )
    return replace(found, **changes)
