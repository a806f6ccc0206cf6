"""Thresholds between honest machines of different classes, as `bench trust` calibrated them.

By the pair of backends and the form in which rows travelled: the relative distance of a window of 32 rows, behind ten
layers, that honest pairs exceed less than once in 10,000 windows. For stages of more layers it grows with their number.
Pairs that nobody has measured have none: their audits are inconclusive.
"""

from __future__ import annotations

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
_FLOAT32 = "float32"
PICK_GAP_LIMIT = 0.06
"""Of the mean over a window of how much better another token is than the one that was picked, in nats. Its tail is
heavy, one token that is far off makes a window: five times what honest windows of the calibrated half had."""


def row_limit(first: str, second: str, numbers: tuple[str, str], codec: str, layers: int) -> float | None:
    """The largest distance that is not held against a stage of so many layers; None: nobody knows. `first` and `second`
    are backends, `numbers` what they compute with."""
    if numbers != (_FLOAT32, _FLOAT32):
        return None
    limit = _MEASURED.get(frozenset({first, second}), {}).get(codec)
    return None if limit is None else limit * max(1.0, layers / _LAYERS_MEASURED)


def gap_limit(first: str, second: str, numbers: tuple[str, str]) -> float | None:
    """The same for the tokens that a last stage picked."""
    is_known = numbers == (_FLOAT32, _FLOAT32) and frozenset({first, second}) in _MEASURED
    return PICK_GAP_LIMIT if is_known else None
