"""Rotary embeddings: from a checkpoint's parameters to inverse frequencies and an amplitude.

Entry i of a rotary head of `dim` entries turns by position · inverse_frequencies[i]. Scalings stretch them:
`linear` all alike, `llama3` and `yarn` the slow ones only, `longrope` each by its own factor, `dynamic` their base,
by a fixed `alpha`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardcompute.models.families.fields import FALLBACK_HINT, MAX_CONTEXT, MAX_HEAD_DIM, Fields
from shardcompute.models.spec import Rope

Frequencies = tuple[float, ...]

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class ScaledRope:
    """A rotation and the context it is good for."""

    rope: Rope
    context_length: int


def default_frequencies(theta: float, dim: int) -> Frequencies:
    return tuple(theta ** (-i / dim) for i in range(0, dim, 2))


def linear_frequencies(theta: float, dim: int, factor: float) -> Frequencies:
    return tuple(f / factor for f in default_frequencies(theta, dim))


def factored_frequencies(theta: float, dim: int, factors: Sequence[float]) -> Frequencies:
    """Each frequency divided by its own factor (LongRoPE; the factors a GGUF file carries)."""
    return tuple(f / s for f, s in zip(default_frequencies(theta, dim), factors, strict=True))


def llama3_frequencies(
    theta: float, dim: int, *, factor: float, low: float, high: float, original_context: int
) -> Frequencies:
    """Slow turns are divided by `factor`, fast ones kept, those between blended."""

    def scale(frequency: float) -> float:
        turns = original_context * frequency / (2 * math.pi)
        if turns < low:
            return frequency / factor
        if turns > high:
            return frequency
        kept = (turns - low) / (high - low)
        return (1 - kept) * frequency / factor + kept * frequency

    return tuple(scale(f) for f in default_frequencies(theta, dim))


def yarn_frequencies(
    theta: float,
    dim: int,
    *,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Frequencies:
    """Entries that turn more than `beta_fast` times in the original context are kept, those that turn less
    than `beta_slow` times divided by `factor`, with a linear ramp over the entries between.
    """

    def entry_turning(times: float) -> float:
        return dim * math.log(original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = entry_turning(beta_fast), entry_turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001

    def blend(i: int, frequency: float) -> float:
        divided = min(max((i - low) / (high - low), 0.0), 1.0)
        return divided * frequency / factor + (1 - divided) * frequency

    return tuple(blend(i, f) for i, f in enumerate(default_frequencies(theta, dim)))


def yarn_amplitude(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    if mscale and mscale_all_dim:
        return yarn_growth(factor, mscale) / yarn_growth(factor, mscale_all_dim)
    return yarn_growth(factor)


def yarn_growth(factor: float, scale: float = 1.0) -> float:
    """How much larger scores are to be in a context that was stretched by `factor`, its square root."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_context(context_length: int, factor: float, original_context: int) -> int:
    """YaRN is often switched on by adding its parameters alone; the context then follows from them."""
    return max(context_length, min(int(factor * original_context), MAX_CONTEXT))


def longrope_amplitude(factor: float, original_context: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


def rotary_dim(fields: Fields, head_dim: int, part: float) -> int:
    """How many entries of a head turn, when `part` of them do."""
    dim = int(head_dim * part)
    if dim < 2 or dim % 2:
        raise fields.corrupt("partial_rotary_factor", part, f"an even part of a head of {head_dim}")
    return dim


def scaled_rope(
    parameters: Fields,
    kind: str,
    *,
    theta: float,
    dim: int,
    context_length: int,
    original_context: int | None,
    harmless: frozenset[str] = frozenset(),
) -> ScaledRope:
    """The rotation that `parameters` (a `rope_parameters` or `rope_scaling` mapping) describe.

    `original_context` overrules the field inside them. Fields that `kind` does not use are refused.
    """
    rope = _scaled(parameters, kind, theta, dim, context_length, original_context)
    parameters.refuse_unread({"rope_type", "type"} | harmless)
    return rope


def _scaled(
    fields: Fields, kind: str, theta: float, dim: int, context: int, original_context: int | None
) -> ScaledRope:
    if kind == "default":
        return ScaledRope(Rope(default_frequencies(theta, dim)), context)
    if kind == "linear":
        factor = fields.number("factor", low=1e-3, high=1e6)
        return ScaledRope(Rope(linear_frequencies(theta, dim, factor)), context)
    if kind == "dynamic":
        return ScaledRope(Rope(default_frequencies(theta * _base_growth(fields, dim), dim)), context)
    stored = fields.integer("original_max_position_embeddings", context, low=2, high=MAX_CONTEXT)
    original = original_context or stored
    if kind == "llama3":
        return ScaledRope(Rope(_llama3(fields, theta, dim, original)), context)
    factor = fields.optional_number("factor", low=1e-3, high=1e6) or context / original
    amplitude = fields.optional_number("attention_factor", high=1e6)
    if kind == "yarn":
        frequencies, usual = _yarn(fields, theta, dim, original, factor)
        limit = yarn_context(context, factor, original)
    else:
        usual = longrope_amplitude(factor, original)
        rope = _longrope(fields, theta, dim, original if context > original else None)
        return ScaledRope(replace(rope, amplitude=usual if amplitude is None else amplitude), context)
    return ScaledRope(Rope(frequencies, usual if amplitude is None else amplitude), limit)


def _base_growth(fields: Fields, dim: int) -> float:
    """HunYuan's files: scaling that others let grow with the text is fixed by `alpha`, the rest is left over."""
    alpha = fields.optional_number("alpha", high=1e9)
    if alpha is None:
        raise fields.unsupported("rope_type", "dynamic", "supported: with a fixed alpha; " + FALLBACK_HINT)
    for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        fields.optional_number(name, low=-1.0)
    return float(alpha ** (dim / max(1, dim - 2)))


def _llama3(fields: Fields, theta: float, dim: int, original: int) -> Frequencies:
    low = fields.number("low_freq_factor", high=1e6)
    high = fields.number("high_freq_factor", high=1e6)
    if high <= low:
        raise fields.corrupt("high_freq_factor", high, f"more than low_freq_factor ({low:g})")
    factor = fields.number("factor", low=1e-3, high=1e6)
    return llama3_frequencies(theta, dim, factor=factor, low=low, high=high, original_context=original)


def _yarn(fields: Fields, theta: float, dim: int, original: int, factor: float) -> tuple[Frequencies, float]:
    """With the amplitude that holds where none is given."""
    mscale = fields.optional_number("mscale", high=1e6)
    mscale_all_dim = fields.optional_number("mscale_all_dim", high=1e6)
    frequencies = yarn_frequencies(
        theta,
        dim,
        factor=factor,
        original_context=original,
        beta_fast=fields.number("beta_fast", 32.0, high=1e6),
        beta_slow=fields.number("beta_slow", 1.0, high=1e6),
        truncate=fields.flag("truncate", True),
    )
    return frequencies, yarn_amplitude(factor, mscale, mscale_all_dim)


def _longrope(fields: Fields, theta: float, dim: int, beyond: int | None) -> Rope:
    """Turning by the short factors, or by the long ones in contexts `beyond` what the model was made for at first."""
    short, long = fields.numbers("short_factor"), fields.numbers("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if factors is None or len(factors) != dim // 2:
            raise fields.corrupt(name, factors, f"a list of {dim // 2} numbers")
    frequencies = factored_frequencies(theta, dim, short or ())
    if beyond is None:
        return Rope(frequencies)
    stretched = factored_frequencies(theta, dim, long or ())
    return Rope(frequencies, long_frequencies=stretched, long_beyond=beyond)


def check_head_dim(fields: Fields, name: str, head_dim: int) -> int:
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise fields.corrupt(name, head_dim, f"an even number from 2 to {MAX_HEAD_DIM}")
    return head_dim
