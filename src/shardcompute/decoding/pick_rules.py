"""Which picks a device can make by itself: those that need nothing but a row's logits, as a `PickRule`."""

from __future__ import annotations

import math

from shardcompute.backends.executor import PickRule
from shardcompute.core.generation import Sampling
from shardcompute.decoding.filters import COLDEST
from shardcompute.decoding.noise import NOISE_RANGE, stream_key
from shardcompute.decoding.penalties import build_adjusters

BEST = PickRule()


def pick_rule(sampling: Sampling, position: int) -> PickRule | None:
    """How the token at `position` is picked, or None where penalties, biases, a grammar or log-probabilities are asked
    for: these are the host's."""
    if sampling.logprobs is not None or sampling.grammar is not None or build_adjusters(sampling):
        return None
    if sampling.temperature == 0.0:
        return BEST
    temperature = max(sampling.temperature, COLDEST)
    return PickRule(
        temperature=temperature,
        reach=NOISE_RANGE * temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        least_score=math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
        key=stream_key(sampling.seed, position),
    )
