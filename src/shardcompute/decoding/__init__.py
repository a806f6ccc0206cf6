"""Decoding: from logits to text that ends where it should, and drafts of what comes next.

Owns sampling as a pure function of logits, seed and position, penalties, grammars, log-probabilities, stop strings,
and speculative decoding: drafters, and the router that weighs what pays. May call `models` and below; knows no
sessions, links or machines.
"""

from __future__ import annotations

from shardcompute.decoding.grammar.json_schemas import drop_limits
from shardcompute.decoding.grammar.masks import (
    GrammarCompiler,
    GrammarState,
    check_rule,
    compiler_of,
    json_rule,
    rule_of,
)
from shardcompute.decoding.logprobs import score_token
from shardcompute.decoding.noise import derive_seed, gumbel_noise
from shardcompute.decoding.penalties import TokenHistory, needs_history
from shardcompute.decoding.sampler import Sampler, build_sampler, choose_token
from shardcompute.decoding.stops import StopMatcher, StopResult
from shardcompute.decoding.validation import validate_sampling

__all__ = [
    "GrammarCompiler",
    "GrammarState",
    "Sampler",
    "StopMatcher",
    "StopResult",
    "TokenHistory",
    "build_sampler",
    "check_rule",
    "choose_token",
    "compiler_of",
    "derive_seed",
    "drop_limits",
    "gumbel_noise",
    "json_rule",
    "needs_history",
    "rule_of",
    "score_token",
    "validate_sampling",
]
