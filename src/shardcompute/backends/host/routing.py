"""Expert routing: which experts a row goes to and with what weight, on the host."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32


def choose_experts(
    scores: Float32, per_token: int, weights_over: Literal["all", "chosen"]
) -> tuple[NDArray[np.int64], Float32]:
    """Expert numbers and weights `[rows, per_token]`, best first; ties go to the lower number."""
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :per_token]
    if weights_over == "all":
        weights = np.take_along_axis(softmax(scores), order, axis=-1)
    else:
        weights = softmax(np.take_along_axis(scores, order, axis=-1))
    return order.astype(np.int64), weights


def softmax(x: Float32) -> Float32:
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Float32 = shifted / shifted.sum(axis=-1, keepdims=True)
    return result
