"""The next token as a pure function of (logits, history, seed, position).

Steps, each left out where it would do nothing: penalties and biases → log-probabilities are recorded →
temperature → top-k → top-p → min-p → Gumbel noise → the best wins (the lowest id among equals). Taking the
best after adding Gumbel noise draws from the softmax of the surviving candidates; as the noise belongs to
(seed, position, token id), plain, batched, speculative and resumed generation all pick the same token.

Logits are never changed in place. A logit of -inf forbids its token; one of +inf leaves no other choice; NaN,
or no token allowed, is a BackendError.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.decoding.filters import Candidates, build_filters, candidates_of
from shardcompute.decoding.logprobs import score_token
from shardcompute.decoding.noise import gumbel_noise
from shardcompute.decoding.penalties import Adjuster, Logits, TokenHistory, build_adjusters
from shardcompute.decoding.ranking import best_token

Sampler = Callable[[Logits, TokenHistory, int], TokenChoice]
"""(logits [vocab], history, position) → choice. `position` is that of the token being chosen."""
Pick = Callable[[Logits, int], int]
_BLOCK = 16384


def choose_token(
    logits: npt.NDArray[np.float32], sampling: Sampling, history: TokenHistory, position: int
) -> TokenChoice:
    """One choice; for many with the same sampling, `build_sampler` once."""
    return build_sampler(sampling)(logits, history, position)


def build_sampler(sampling: Sampling) -> Sampler:
    """The steps that `sampling` (already validated) asks for, composed into one function."""
    adjusters = build_adjusters(sampling)
    pick = best_token if sampling.temperature == 0.0 else _build_draw(sampling)
    top = sampling.logprobs

    def sample(logits: Logits, history: TokenHistory, position: int) -> TokenChoice:
        adjusted = _adjust(logits, history, adjusters) if adjusters else logits
        token = pick(adjusted, position)
        return TokenChoice(token) if top is None else score_token(adjusted, token, top, position)

    return sample


def _adjust(logits: Logits, history: TokenHistory, adjusters: tuple[Adjuster, ...]) -> Logits:
    adjusted = logits.copy()
    for adjust in adjusters:
        adjust(adjusted, history)
    return adjusted


def _build_draw(sampling: Sampling) -> Pick:
    filters = build_filters(sampling)

    def draw(logits: Logits, position: int) -> int:
        best = float(logits[best_token(logits, position)])
        candidates = candidates_of(logits, best, sampling.temperature, sampling.top_k)
        for keep in filters:
            candidates = keep(candidates)
        return _best_with_noise(candidates, sampling.seed, position)

    return draw


def _best_with_noise(candidates: Candidates, seed: int, position: int) -> int:
    """The winner, found block by block: whole vocabularies of noise would not fit the processor's caches."""
    winner, best = -1, -np.inf
    for start in range(0, candidates.ids.size, _BLOCK):
        ids = candidates.ids[start : start + _BLOCK]
        noisy = gumbel_noise(seed, position, ids)
        noisy += candidates.scores[start : start + _BLOCK]
        index = int(np.argmax(noisy))
        if noisy[index] > best:
            winner, best = int(ids[index]), float(noisy[index])
    return winner
