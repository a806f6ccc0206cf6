from __future__ import annotations

import numpy as np
import pytest

from shardcompute.core.errors import BackendError
from shardcompute.decoding.ranking import best_token, largest


def test_best_token_of_equals_has_the_lowest_id() -> None:
    assert best_token(np.array([1, 3, 3, 2], dtype=np.float32), 0) == 1


def test_nan_names_the_position() -> None:
    with pytest.raises(BackendError, match="position 12 contain NaN"):
        best_token(np.array([1, np.nan, np.inf], dtype=np.float32), 12)


def test_nothing_allowed_names_the_position() -> None:
    with pytest.raises(BackendError, match="position 9 forbid every token"):
        best_token(np.full(4, -np.inf, dtype=np.float32), 9)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, 5000])
@pytest.mark.parametrize("count", [0, 1, 7, 40, 1200, 6000])
def test_largest_agrees_with_a_full_sort(size: int, count: int) -> None:
    values = np.random.default_rng(size).integers(0, 50, size).astype(np.float32)  # many ties
    expected = sorted(range(size), key=lambda index: (-values[index], index))[:count]
    assert largest(values, count).tolist() == expected


def test_largest_copes_with_infinities() -> None:
    values = np.full(100, -np.inf, dtype=np.float32)
    values[[90, 10]] = [5.0, np.inf]
    assert largest(values, 4).tolist() == [10, 90, 0, 1]
