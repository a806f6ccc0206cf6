from __future__ import annotations

import math
from typing import Any

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling
from shardcompute.decoding import validate_sampling


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 2.0, "top_p": 0.0, "min_p": 1.0, "top_k": 10**9, "repetition_penalty": 0.01},
        {"presence_penalty": -2.0, "frequency_penalty": 2, "logprobs": 20, "seed": -(1 << 63)},
        {"logit_bias": {0: -100.0, 99: 100}, "logprobs": 0, "seed": (1 << 64) - 1},
    ],
)
def test_sensible_parameters_pass(fields: dict[str, Any]) -> None:
    validate_sampling(Sampling(**fields), 100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("top_k", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 11.0),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_errors_name_the_field_and_say_what_to_do(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^Invalid '{field}': expected .* but got") as caught:
        validate_sampling(Sampling(**{field: value}), 100)
    assert caught.value.hint
