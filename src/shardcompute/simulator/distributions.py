"""Distributions of scenario files: a number, or a table with one key that says how values are drawn.

memory_gb = 16                              always the same
memory_gb = { uniform = [8, 32] }           anything between
memory_gb = { choice = [8, 16, 16, 32] }    one of these
memory_gb = { cycle = [8, 16] }             these in turn
read_gb_per_s = { lognormal = [12, 0.4] }   median, and the spread of its logarithm
life_s = { exponential = 7200 }             mean
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from msgspec import Struct

from shardcompute.core.errors import UsageError

Draw = Callable[[random.Random], float]


class Drawn(Struct, frozen=True, forbid_unknown_fields=True):
    """How a value is drawn: exactly one of these."""

    uniform: tuple[float, float] | None = None
    choice: tuple[float, ...] | None = None
    cycle: tuple[float, ...] | None = None
    lognormal: tuple[float, float] | None = None
    exponential: float | None = None


Distribution = float | Drawn


def draw_from(name: str, given: Distribution, least: float = 0.0) -> Draw:
    """What draws values of a field. UsageError where it says nothing, says two things, or allows less than `least`."""
    if not isinstance(given, Drawn):
        return _constant(_checked(name, given, least))
    said = [field for field in given.__struct_fields__ if getattr(given, field) is not None]
    if len(said) != 1:
        raise UsageError(
            f"{name} must say one way of drawing, and says {', '.join(said) or 'none'}",
            hint="give a number, or one of uniform, choice, cycle, lognormal, exponential",
        )
    return _drawer(name, given, least)


def _drawer(name: str, given: Drawn, least: float) -> Draw:
    if given.uniform is not None:
        low, high = given.uniform
        if low > high:
            raise UsageError(
                f"{name} is uniform from {low:g} down to {high:g}", hint="put the lower end first"
            )
        low = _checked(name, low, least)
        return lambda rng: rng.uniform(low, high)
    if given.lognormal is not None:
        median, sigma = _checked(name, given.lognormal[0], least), _checked(name, given.lognormal[1], 0.0)
        # What is drawn below the least that makes sense counts as the least.
        return lambda rng: max(least, median * math.exp(sigma * rng.gauss(0.0, 1.0)))
    if given.exponential is not None:
        mean = _checked(name, given.exponential, least)
        return lambda rng: max(least, rng.expovariate(1 / mean) if mean > 0 else 0.0)
    values = given.choice or given.cycle
    if not values:
        raise UsageError(f"{name} chooses from nothing", hint="list at least one value")
    for value in values:
        _checked(name, value, least)
    return (lambda rng: rng.choice(values)) if given.choice is not None else _cycle(values)


def _constant(value: float) -> Draw:
    return lambda _: value


def _cycle(values: tuple[float, ...]) -> Draw:
    turn = -1

    def following(_: random.Random) -> float:
        nonlocal turn
        turn += 1
        return values[turn % len(values)]

    return following


def _checked(name: str, value: float, least: float) -> float:
    if not math.isfinite(value) or value < least:
        raise UsageError(f"{name} is {value:g}", hint=f"give a number of at least {least:g}")
    return value
