"""From logits to text that ends where it should: sampling, log-probabilities, drafts, stop strings."""

from __future__ import annotations

from shardcompute.decoding.grammar import GrammarCompiler, GrammarState, compiler_of, json_rule, rule_of
from shardcompute.decoding.logprobs import score_token
from shardcompute.decoding.noise import derive_seed, gumbel_noise
from shardcompute.decoding.penalties import TokenHistory
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
    "choose_token",
    "compiler_of",
    "derive_seed",
    "gumbel_noise",
    "json_rule",
    "rule_of",
    "score_token",
    "validate_sampling",
]
