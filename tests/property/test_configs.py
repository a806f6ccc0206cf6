"""Whatever a description says, the answer is a spec or one of our own errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import ShardComputeError
from shardcompute.models.families import GGUF_ARCHITECTURES, from_gguf, from_hf_config
from shardcompute.models.layout import Layout
from shardcompute.models.spec import ModelSpec
from support.models.tiny import FAMILIES, tiny_names

NUMBERS = st.one_of(
    st.integers(-4, 300),
    st.integers(),
    st.sampled_from([10**12, 10**400, -(10**400), 2**31, 2**63]),
    st.floats(),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
KEYS = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "context_length",
    "expert_count",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
]
GGUF: dict[str, Any] = {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "vocab_size": 100,
    "context_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
PER_LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
PER_LAYER += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
GGUF_NAMES = [f"blk.{i}.{name}.weight" for i in range(2) for name in PER_LAYER]
GGUF_NAMES += ["token_embd.weight", "output_norm.weight"]
ROPES = ["default", "linear", "llama3", "yarn", "longrope", "su", "dynamic"]
ROPE_FIELDS = [
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
]


@functools.cache
def _valid(name: str) -> tuple[dict[str, Any], list[str]]:
    config = FAMILIES[name]()
    return config.to_dict(), tiny_names(config)


def _check(parse: Callable[[], tuple[ModelSpec, Layout]]) -> None:
    """Any other error than ours comes out of here."""
    try:
        spec, layout = parse()
    except ShardComputeError as error:
        message = str(error)
    else:
        _check_sane(spec, layout)
        return
    assert 0 < len(message) < 1000


def _check_sane(spec: ModelSpec, layout: Layout) -> None:
    assert len(spec.layers) == len(layout.layers) <= 1024
    assert spec.heads % spec.kv_heads == 0
    assert all(0 < 2 * len(rope.inverse_frequencies) <= spec.head_dim for rope in spec.ropes)
    assert all(layer.rope is None or layer.rope < len(spec.ropes) for layer in spec.layers)
    assert all(layer.window is None or layer.window > 0 for layer in spec.layers)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_config(data: st.DataObject) -> None:
    config, names = _valid(data.draw(st.sampled_from(sorted(FAMILIES))))
    fields = st.sampled_from(sorted(config))
    changes = data.draw(st.dictionaries(fields, VALUES, min_size=1, max_size=3))
    removed = data.draw(st.sets(fields, max_size=2))
    mutated = {key: value for key, value in {**config, **changes}.items() if key not in removed}
    _check(lambda: from_hf_config(mutated, names))


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["llama", "gemma3", "phi3", "gpt-oss"]),
    field=st.sampled_from(["rope_parameters", "rope_scaling"]),
    kind=st.sampled_from(ROPES),
    parameters=st.dictionaries(st.sampled_from(ROPE_FIELDS), NUMBERS | VALUES, max_size=7),
)
def test_any_rope_parameters(name: str, field: str, kind: str, parameters: dict[str, Any]) -> None:
    config, names = _valid(name)
    rope: dict[str, Any] = {**parameters, "rope_type": kind}
    if name == "gemma3" and field == "rope_parameters":
        rope = {"full_attention": rope, "sliding_attention": rope}
    _check(lambda: from_hf_config({**config, field: rope}, names))


@settings(max_examples=200, deadline=None)
@given(
    config=st.dictionaries(st.text(max_size=12), VALUES, max_size=6), name=st.sampled_from(sorted(FAMILIES))
)
def test_a_config_of_anything(config: dict[str, Any], name: str) -> None:
    _check(lambda: from_hf_config({**config, "model_type": _valid(name)[0]["model_type"]}, ["x"]))


@settings(max_examples=300, deadline=None)
@given(
    values=st.dictionaries(st.sampled_from(sorted(GGUF) + KEYS), st.integers(1, 64) | VALUES, max_size=3),
    extra=st.lists(st.text(max_size=8), max_size=2),
    factors=st.none() | st.lists(st.floats(), max_size=32),
)
def test_mutated_gguf_metadata(values: dict[str, Any], extra: list[str], factors: list[float] | None) -> None:
    metadata = {f"llama.{key}": value for key, value in {**GGUF, **values}.items()}
    metadata["general.architecture"] = "llama"
    _check(lambda: from_gguf(metadata, GGUF_NAMES + extra, factors))


@settings(max_examples=200, deadline=None)
@given(
    architecture=st.sampled_from(sorted(GGUF_ARCHITECTURES)) | st.text(max_size=8),
    values=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 64) | VALUES, max_size=len(KEYS)),
    names=st.lists(st.text(max_size=8), max_size=70),
)
def test_any_gguf_metadata(architecture: str, values: dict[str, Any], names: list[str]) -> None:
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    metadata["general.architecture"] = architecture
    _check(lambda: from_gguf(metadata, names))
