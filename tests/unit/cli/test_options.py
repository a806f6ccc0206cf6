"""Options that are repeated here are those of their owners."""

from __future__ import annotations

import pytest

from shardcompute.cli.options.common import Backend, WeightForm
from shardcompute.cli.sizes import format_age, parse_size
from shardcompute.core.errors import UsageError
from shardcompute.runtime.shard import BACKENDS
from shardcompute.weights.formats.quantise import WEIGHT_FORMS


def test_names_are_those_of_their_rooms() -> None:
    assert set(Backend) == set(BACKENDS)
    assert set(WeightForm) == set(WEIGHT_FORMS)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100", 100),
        ("1K", 1024),
        ("2g", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("512MB", 512 << 20),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1G", "G", "2X", "1e9", "9" * 400, "999999999999999T", "0.0001"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "now"), (59, "now"), (60, "1 minute"), (7200, "2 hours"), (90_000, "1 day"), (4e7, "1 year")],
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
