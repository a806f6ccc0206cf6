"""Vocabulary search: tokens are tried through the layers before a boundary, which are public, until the row that was
seen there comes out.

From left to right, with what was found so far before each try. A row that matches to rounding is found for certain;
else the nearest is taken. Rows that a secret rotation has turned are matched by what no rotation changes: their length
and their products with the rows before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.executor import Executor
from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.batch import Segment

_BATCH = 32
_OWN = 0
"""The session of what was found; tries have the next ones."""
Distance = Callable[[int, Float32, Float32], Array]
"""(position, rows of the tries, own rows of what was found before) → how far each try is from what was seen"""


@dataclass(frozen=True, slots=True)
class SearchedText:
    ids: Array
    tries: int
    matches: int
    """Positions at which a try came out as what was seen."""


def distance_to(seen: Float32) -> Distance:
    """To rows as they were seen, relative to their lengths."""

    def distance(position: int, rows: Float32, _: Float32) -> Array:
        row = seen[position]
        return np.asarray(np.linalg.norm(rows - row, axis=1) / np.linalg.norm(row))

    return distance


def gram_distance_to(seen: Float32) -> Distance:
    """To rows of which only lengths and products count."""

    def distance(position: int, rows: Float32, before: Float32) -> Array:
        row = seen[position].astype(np.float64)
        wanted = np.append(seen[:position].astype(np.float64) @ row, row @ row)
        exact = rows.astype(np.float64)
        found = np.concatenate([exact @ before.T.astype(np.float64), (exact**2).sum(1)[:, None]], axis=1)
        return np.asarray(np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted))

    return distance


def search_text(
    executor: Executor,
    candidates: Sequence[Array],
    distance: Distance,
    *,
    tolerance: float,
    is_exact: bool = True,
) -> SearchedText:
    """What stood in a text of as many positions as there are lists of candidates, likely ones first.

    Where nothing matches rows that are exact, nothing can match behind it either: from there on first candidates are
    taken."""
    found: list[int] = []
    own: list[Float32] = []
    tries = matches = 0
    is_lost = False
    try:
        for position, tokens in enumerate(candidates):
            best, best_distance = int(tokens[0]), np.inf
            before = np.stack(own) if own else np.zeros((0, 1), np.float32)
            start = 0
            while start < (1 if is_lost else len(tokens)) and best_distance > tolerance:
                batch = tokens[start : start + (1 if start == 0 else _BATCH)]
                rows = _try_tokens(executor, position, batch)
                far = distance(position, rows, before if own else np.zeros((0, rows.shape[1]), np.float32))
                nearest = int(far.argmin())
                if far[nearest] < best_distance:
                    best, best_distance = int(batch[nearest]), float(far[nearest])
                start += len(batch)
            tries += start
            matches += best_distance <= tolerance
            is_lost = is_lost or (is_exact and best_distance > tolerance)
            found.append(best)
            own.append(_step(executor, [Segment(_OWN, position, 1, 0)], np.array([best]))[0])
    finally:
        executor.close_session(_OWN)
    return SearchedText(np.array(found), tries, matches)


def _try_tokens(executor: Executor, position: int, tokens: Array) -> Float32:
    sessions = range(_OWN + 1, _OWN + 1 + len(tokens))
    try:
        if position:
            for session in sessions:
                executor.adopt(_OWN, session, position)
        return _step(executor, [Segment(session, position, 1, 0) for session in sessions], tokens)
    finally:
        for session in sessions:
            executor.close_session(session)


def _step(executor: Executor, segments: list[Segment], tokens: Array) -> Float32:
    return np.array(executor.step(segments, np.asarray(tokens, np.int64)), np.float32)
