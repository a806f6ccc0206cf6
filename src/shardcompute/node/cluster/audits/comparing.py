"""Comparing what a stage signed with what another machine computes from the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.exactness import parse_class
from shardcompute.backends.matrix import Array
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Picked
from shardcompute.decoding.noise import gumbel_noise
from shardcompute.trust.distributions import WINDOW, ScoredPick, mean_gap
from shardcompute.trust.fingerprints import peak_distance, row_distance
from shardcompute.trust.judgement import Comparison
from shardcompute.trust.thresholds import gap_limit, peak_limit, row_limit
from shardcompute.wire import find_codec


@dataclass(frozen=True, slots=True)
class SentPiece:
    """Rows as the next stage has read them, and the form in which they travelled."""

    codec: str
    rows: Array


def compares_bits(first: str, second: str) -> bool:
    """Whether two classes are one whose rows have the same bits however they are computed."""
    known = parse_class(first)
    return first == second and known is not None and known.has_exact_rows


def compare_rows(
    sent: Sequence[SentPiece], computed: Array, classes: tuple[str, str], layers: int
) -> Comparison:
    """What was sent, with what another machine has computed, in the form in which it was sent."""
    found = as_sent(sent, computed)
    if found is None:
        return "far"
    said = np.concatenate([piece.rows for piece in sent])
    if np.array_equal(said, found):
        return "equal"
    if compares_bits(*classes):
        return "far"
    limit, peak = (_loosest(of, sent, classes, layers) for of in (row_limit, peak_limit))
    pairs = [(said[at : at + WINDOW], found[at : at + WINDOW]) for at in _window_starts(len(said))]
    if limit is None or peak is None or not pairs:
        return "unknown"
    is_near = all(row_distance(*pair) <= limit and peak_distance(*pair) <= peak for pair in pairs)
    return "near" if is_near else "far"


def _window_starts(rows: int) -> list[int]:
    """Of windows that leave no row out: the last one ends with the rows, and may overlap with the one before."""
    if rows < WINDOW:
        return []
    starts = list(range(0, rows - WINDOW + 1, WINDOW))
    return starts if rows % WINDOW == 0 else [*starts, rows - WINDOW]


def as_sent(sent: Sequence[SentPiece], computed: Array) -> Array | None:
    """Computed rows as the next stage would have read them; None where they are others altogether."""
    parts, first = [], 0
    for piece in sent:
        part = computed[first : first + len(piece.rows)]
        if part.shape != piece.rows.shape:
            return None
        packing = find_codec(piece.codec).rows
        packed = packing.pack(np.ascontiguousarray(part, dtype=np.float32))
        parts.append(packing.unpack(packed, part.shape[1]))
        first += len(part)
    return np.concatenate(parts) if first == len(computed) else None


def compare_picks(said: Sequence[int], computed: Sequence[Picked]) -> Comparison:
    """Tokens that were picked, with those that a machine of the same class picks from the same rows."""
    picked = [each.choice.id for each in computed if not each.is_scored]
    return "equal" if picked == list(said) else "far"


def can_score(sampling: Sampling) -> bool:
    """Whether a token's score follows from log-probabilities alone, without the tokens before it."""
    plain = Sampling(temperature=sampling.temperature, seed=sampling.seed, logprobs=sampling.logprobs)
    return sampling == plain


def compare_scores(sampling: Sampling, scored: Sequence[Picked], classes: tuple[str, str]) -> Comparison:
    """Tokens that were picked, as a machine of another class scores them beside its best ones."""
    first, second = (parse_class(each) for each in classes)
    if first is None or second is None or len(scored) < WINDOW:
        return "unknown"
    limit = gap_limit(first.backend, second.backend, (first.numbers, second.numbers))
    if limit is None:
        return "unknown"
    picks = [_scored(sampling, each) for each in scored]
    gaps = [mean_gap(picks[at : at + WINDOW]) for at in _window_starts(len(picks))]
    return "near" if max(gaps) <= limit else "far"


def _scored(sampling: Sampling, pick: Picked) -> ScoredPick:
    choice = pick.choice
    ids = np.array([choice.id, *(token for token, _ in choice.alternatives)], dtype=np.int64)
    scores = np.array([choice.logprob or 0.0, *(score for _, score in choice.alternatives)])
    if sampling.temperature > 0.0:
        scores = scores / sampling.temperature + gumbel_noise(sampling.seed, pick.position + 1, ids)
        scores = scores * sampling.temperature
    others = dict(zip(ids[1:].tolist(), scores[1:].tolist(), strict=True))
    return ScoredPick(int(ids[0]), float(scores[0]), others)


def _loosest(
    limit_of: Callable[[str, str, tuple[str, str], str, int], float | None],
    sent: Sequence[SentPiece],
    classes: tuple[str, str],
    layers: int,
) -> float | None:
    """The loosest of the forms in which the rows travelled."""
    first, second = (parse_class(each) for each in classes)
    if first is None or second is None:
        return None
    numbers = (first.numbers, second.numbers)
    limits = [limit_of(first.backend, second.backend, numbers, piece.codec, layers) for piece in sent]
    known = [each for each in limits if each is not None]
    return max(known) if known and len(known) == len(limits) else None
