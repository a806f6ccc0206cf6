"""A model of round numbers, for tests that only count its bytes."""

from __future__ import annotations

from msgspec.structs import replace

from shardcompute.control import Model

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
