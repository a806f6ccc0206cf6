"""Thresholds between honest machines of different classes, as `bench trust` calibrated them.

By the pair of backends and the form in which rows travelled: the relative distance of a window of 32 rows, behind ten
layers, that honest pairs exceed less than once in 10,000 windows; of the median row, and of the one that is furthest
off, so that nobody cheats in fewer than half of the rows. For stages of more layers both grow with their number.
Pairs that nobody has measured have none: their audits are inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping

_LAYERS_MEASURED = 10
_MEASURED: dict[frozenset[str], dict[str, float]] = {
    frozenset({"onnx", "torch"}): {
        "exact": 0.0220,
        "bf16": 0.0223,
        "int8": 0.0297,
        "int8-outliers": 0.0235,
        "fp8": 0.0340,
    },
}
_PEAKS_MEASURED: dict[frozenset[str], dict[str, float]] = {
    # A quarter above what was calibrated: single rows have a heavier tail than medians.
    frozenset({"onnx", "torch"}): {
        "exact": 0.0653,
        "bf16": 0.0654,
        "int8": 0.0715,
        "int8-outliers": 0.0665,
        "fp8": 0.0964,
    },
}
_FLOAT32 = "float32"
PICK_GAP_LIMIT = 0.06
"""Of the mean over a window of how much better another token is than the one that was picked, in nats. Its tail is
heavy, one token that is far off makes a window: five times what honest windows of the calibrated half had."""


def row_limit(first: str, second: str, numbers: tuple[str, str], codec: str, layers: int) -> float | None:
    """The largest distance that is not held against a stage of so many layers; None: nobody knows. `first` and `second`
    are backends, `numbers` what they compute with."""
    return _limit(_MEASURED, frozenset({first, second}), numbers, codec, layers)


def peak_limit(first: str, second: str, numbers: tuple[str, str], codec: str, layers: int) -> float | None:
    """The same for the row of a window that is furthest off."""
    return _limit(_PEAKS_MEASURED, frozenset({first, second}), numbers, codec, layers)


def _limit(
    measured: Mapping[frozenset[str], Mapping[str, float]],
    backends: frozenset[str],
    numbers: tuple[str, str],
    codec: str,
    layers: int,
) -> float | None:
    if numbers != (_FLOAT32, _FLOAT32):
        return None
    limit = measured.get(backends, {}).get(codec)
    return None if limit is None else limit * max(1.0, layers / _LAYERS_MEASURED)


def gap_limit(first: str, second: str, numbers: tuple[str, str]) -> float | None:
    """The same for the tokens that a last stage picked."""
    is_known = numbers == (_FLOAT32, _FLOAT32) and frozenset({first, second}) in _MEASURED
    return PICK_GAP_LIMIT if is_known else None
