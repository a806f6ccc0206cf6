"""The rotations of a model in a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardcompute.models.families.fields import MAX_CONTEXT, Fields
from shardcompute.models.families.gguf_architectures import GgufArchitecture
from shardcompute.models.families.rope import (
    ScaledRope,
    default_frequencies,
    yarn_amplitude,
    yarn_context,
    yarn_frequencies,
)
from shardcompute.models.spec import Rope

_TYPES = ("none", "linear", "yarn", "longrope")


def gguf_ropes(
    known: GgufArchitecture,
    fields: Fields,
    head_dim: int,
    context_length: int,
    factors: Sequence[float] | None,
    long_factors: Sequence[float] | None = None,
) -> list[ScaledRope]:
    """The model's rotation; for an architecture with `local_theta` also that of its sliding layers."""
    dim = fields.integer("rope.dimension_count", head_dim, high=head_dim)
    if dim % 2 or (dim != head_dim and not known.has_partial_rope):
        raise fields.unsupported("rope.dimension_count", dim, f"supported: the head's size, {head_dim}")
    theta = fields.number("rope.freq_base", 10_000.0, low=1.0)
    kind = fields.one_of("rope.scaling.type", fields.text("rope.scaling.type", "none"), _TYPES)
    original = fields.integer("rope.scaling.original_context_length", context_length, low=2, high=MAX_CONTEXT)
    if kind == "yarn":
        rope = _yarn(known, fields, theta, dim, context_length, original, factors)
    else:
        rope = _stretched(known, fields, kind, theta, dim, context_length, original, factors)
        if long_factors is not None and known.has_partial_rope and context_length > original:
            beyond = _stretched(known, fields, kind, theta, dim, context_length, original, long_factors)
            rope = _switching(rope, beyond, original, context_length)
    if known.query_growth is not None:
        still = Rope((0.0,) * (head_dim // 2), growth=known.query_growth)
        return [rope, replace(rope, rope=still)]
    if known.local_theta is None:
        return [rope]
    local_theta = fields.number("rope.freq_base_swa", known.local_theta, low=1.0)
    return [rope, ScaledRope(Rope(default_frequencies(local_theta, dim)), context_length)]


def yarn_log_multiplier(fields: Fields) -> float:
    """By how much scores grow with the logarithm of YaRN's factor, twice; 0 where turned entries grow instead."""
    return fields.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1e-9, high=1e6)


def _switching(short: ScaledRope, long: ScaledRope, original: int, context: int) -> ScaledRope:
    """One rotation for contexts up to the original one, the other for longer ones."""
    frequencies = long.rope.inverse_frequencies
    return ScaledRope(replace(short.rope, long_frequencies=frequencies, long_beyond=original), context)


def _stretched(
    known: GgufArchitecture,
    fields: Fields,
    kind: str,
    theta: float,
    dim: int,
    context: int,
    original: int,
    factors: Sequence[float] | None,
) -> ScaledRope:
    """No scaling, one factor for all entries, a factor for each, or both."""
    legacy = fields.number("rope.scale_linear", 1.0, low=1e-3, high=1e6)
    factor = fields.number("rope.scaling.factor", legacy, low=1e-3, high=1e6)
    divisor = factor if kind == "linear" or (kind == "none" and legacy != 1.0) else 1.0
    frequencies = [f / divisor for f in default_frequencies(theta, dim)]
    amplitude = fields.number("rope.scaling.attn_factor", 1.0, high=1e6)
    if factors is None:
        if kind == "longrope":
            raise fields.corrupt("rope.scaling.type", kind, "rope_factors_short.weight in the file")
        return ScaledRope(Rope(tuple(frequencies), amplitude), context)
    if len(factors) != dim // 2 or not all(1e-6 < f < 1e12 for f in factors):
        raise fields.corrupt(
            "rope.dimension_count", dim, f"twice as many as positive rope factors ({len(factors)})"
        )
    turned = tuple(f / s for f, s in zip(frequencies, factors, strict=True))
    # Phi-3's factors are those for short contexts: past the original one, others would be needed.
    limit = min(context, original) if known.has_partial_rope else context
    return ScaledRope(Rope(turned, amplitude), limit)


def _yarn(
    known: GgufArchitecture,
    fields: Fields,
    theta: float,
    dim: int,
    context: int,
    original: int,
    factors: Sequence[float] | None,
) -> ScaledRope:
    if factors is not None:
        raise fields.unsupported("rope.scaling.type", "yarn", "supported: without rope factors in the file")
    factor = fields.number("rope.scaling.factor", low=1e-3, high=1e6)
    extrapolation = fields.number("rope.scaling.yarn_ext_factor", 1.0)
    fields.one_of("rope.scaling.yarn_ext_factor", extrapolation, (1.0,))
    grows_scores = known.is_latent and yarn_log_multiplier(fields) > 0
    amplitude = 1.0 if grows_scores else yarn_amplitude(factor)
    for name in ("attn_factor", "yarn_attn_factor"):
        amplitude *= fields.number(f"rope.scaling.{name}", 1.0, high=1e6)
    frequencies = yarn_frequencies(
        theta,
        dim,
        factor=factor,
        original_context=original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, high=1e6),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, high=1e6),
        truncate=not known.is_gpt_oss,
    )
    return ScaledRope(Rope(frequencies, amplitude), yarn_context(context, factor, original))
