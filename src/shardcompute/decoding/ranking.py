"""Order among logits: the best one, and the largest few without sorting a whole vocabulary.

Everywhere in this room larger values come first and equal values are ordered by token id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import BackendError

_GROUP = 32
_BROKEN_BACKEND = (
    "the backend computed this step wrongly: check the weights, or try another backend or precision"
)


def best_token(logits: npt.NDArray[np.float32], position: int) -> int:
    """The most likely token. BackendError if the logits hold a NaN or allow no token at all."""
    token = int(np.argmax(logits))  # a NaN counts as the largest, so one look at the winner finds it
    best = float(logits[token])
    if np.isnan(best):
        raise BackendError(
            f"the logits for position {position} contain NaN, so no token can be chosen",
            hint=_BROKEN_BACKEND,
        )
    if best == -np.inf:
        raise BackendError(
            f"the logits for position {position} forbid every token, so none can be chosen",
            hint=_BROKEN_BACKEND,
        )
    return token


def largest(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest values (of all, if fewer), larger first, equal ones by index."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    indices = np.flatnonzero(values >= _floor_of_largest(values, count))
    picked = values[indices]
    if picked.size > count:
        bound = np.partition(picked, picked.size - count)[picked.size - count]
        # Ties at the bound all stay for now; the stable sort below lets the lowest indices win.
        kept = np.flatnonzero(picked >= bound)
        indices, picked = indices[kept], picked[kept]
    return indices[np.argsort(-picked, kind="stable")[:count]].astype(np.int64, copy=False)


def _floor_of_largest(values: npt.NDArray[np.floating], count: int) -> float:
    """A value that at least `count` of the values reach, close to the `count`-th largest.

    Of values dealt into groups, each of the `count` best groups has one that reaches the least of these
    groups' maxima. That leaves few candidates at the price of one pass, far cheaper than partitioning a
    vocabulary.
    """
    groups = values.size // _GROUP
    if count > groups:
        return -np.inf
    maxima = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    return float(np.partition(maxima, groups - count)[groups - count])
