from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families.fields import Fields
from shardcompute.models.families.rope import default_frequencies, scaled_rope
from shardcompute.models.rotation import rope_tables
from shardcompute.models.spec import Rope

CONTEXT = 4096
LONG = [1.0 + i / 3 for i in range(16)]


def _scaled(kind: str, dim: int = 32, theta: float = 1e4, **parameters: Any) -> Any:
    fields = Fields({"rope_type": kind, **parameters}, "test")
    return scaled_rope(fields, kind, theta=theta, dim=dim, context_length=CONTEXT, original_context=None)


def _expected(kind: str, theta: float = 1e4, **parameters: Any) -> tuple[np.ndarray, float]:
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](config)
    return frequencies.numpy(), amplitude


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("linear", {"factor": 8.0}),
        (
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        ),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 1024}),
        ("yarn", {"factor": 32.0, "original_max_position_embeddings": 512, "truncate": False}),
        ("yarn", {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 1024}),
        ("yarn", {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1}),
        ("yarn", {"factor": 4.0, "attention_factor": 1.25}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 8}),
        (
            "longrope",
            {"short_factor": LONG, "long_factor": LONG[::-1], "original_max_position_embeddings": 256},
        ),
        ("longrope", {"short_factor": LONG, "long_factor": LONG, "factor": 3.0}),
        ("longrope", {"short_factor": LONG, "long_factor": LONG, "factor": 3.0, "attention_factor": 1.5}),
    ],
)
def test_scaled_as_transformers_does(kind: str, theta: float, parameters: dict[str, Any]) -> None:
    frequencies, amplitude = _expected(kind, theta, **parameters)
    ours = _scaled(kind, theta=theta, **parameters)
    np.testing.assert_allclose(ours.rope.inverse_frequencies, frequencies, rtol=1e-6)
    assert ours.rope.amplitude == pytest.approx(amplitude, rel=1e-9)


def test_default_frequencies_fall_from_one_by_equal_ratios() -> None:
    frequencies = default_frequencies(16.0, 8)
    np.testing.assert_allclose(frequencies, [1.0, 0.5, 0.25, 0.125])


def test_longrope_turns_by_long_factors_in_a_context_beyond_the_original_one() -> None:
    short, long = LONG, LONG[::-1]
    scaled = _scaled("longrope", short_factor=short, long_factor=long, original_max_position_embeddings=1000)
    rope = scaled.rope
    assert (scaled.context_length, rope.long_beyond) == (CONTEXT, 1000)
    by_short = Rope(rope.inverse_frequencies, rope.amplitude)
    by_long = Rope(rope.long_frequencies or (), rope.amplitude)
    for context, wanted in ((1000, by_short), (1001, by_long)):
        np.testing.assert_array_equal(rope_tables(rope, context), rope_tables(wanted, context))
    assert (
        rope.long_frequencies
        == _scaled("longrope", short_factor=long, long_factor=long).rope.inverse_frequencies
    )


def test_longrope_within_the_original_context_needs_no_long_factors() -> None:
    within = {"short_factor": LONG, "long_factor": LONG, "original_max_position_embeddings": CONTEXT}
    assert _scaled("longrope", **within).rope.long_frequencies is None


def test_yarn_reaches_as_far_as_it_stretches() -> None:
    assert _scaled("yarn", factor=4.0, original_max_position_embeddings=4096).context_length == 16384
    assert _scaled("yarn", factor=2.0, original_max_position_embeddings=64).context_length == CONTEXT


@pytest.mark.parametrize(
    ("kind", "parameters", "field"),
    [
        ("linear", {}, "factor"),
        ("linear", {"factor": -1.0}, "factor"),
        ("linear", {"factor": float("inf")}, "factor"),
        ("llama3", {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
        ("longrope", {"short_factor": LONG[:-1], "long_factor": LONG}, "short_factor"),
        ("longrope", {"short_factor": LONG}, "long_factor"),
        ("longrope", {"short_factor": [0.0] * 16, "long_factor": LONG}, "short_factor"),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ],
)
def test_impossible_parameters_are_named(kind: str, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(CorruptModelError, match=field):
        _scaled(kind, **parameters)


def test_a_parameter_that_the_scaling_does_not_use_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="mrope_section"):
        _scaled("linear", factor=2.0, mrope_section=[4, 4])
