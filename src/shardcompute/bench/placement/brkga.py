"""BRKGA: a genetic algorithm on random keys. Each machine has a key for whether it takes part and one for its place.

Every generation the best are kept, some are born anew at random, and the others take each key from one of the best
(mostly) or from anybody. Keys of known layouts can be put among the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from shardcompute.control.solver.space import CountedOrder, Floats, OrderCosts

_INHERITED = 0.7
"""How likely a key is the better parent's."""


@dataclass(frozen=True, slots=True)
class Genetics:
    population: int = 60
    best: int = 12
    newborn: int = 12
    generations: int = 400


def evolve(
    costs: OrderCosts,
    times_s: Floats,
    seed: int,
    *,
    warm: Sequence[Sequence[int]] = (),
    genetics: Genetics | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CountedOrder | None:
    """The best order that was found, judged with the best of these times for the slowest stage."""
    terms = genetics or Genetics()
    chance = np.random.default_rng(seed)
    count = costs.space.count
    keys = chance.random((terms.population, 2, count))
    for row, order in enumerate(warm[: terms.population]):
        keys[row] = encode(order, count, chance)
    judged = [_judge(costs, each, times_s) for each in keys]
    for _ in range(terms.generations):
        if should_stop():
            break
        ranked = np.argsort([each.cost for each in judged], kind="stable")
        keys, judged = keys[ranked], [judged[i] for i in ranked]
        children = _breed(keys, terms, chance)
        newborn = chance.random((terms.newborn, 2, count))
        following = np.concatenate([children, newborn])
        keys = np.concatenate([keys[: terms.best], following])
        judged = [*judged[: terms.best], *(_judge(costs, each, times_s) for each in following)]
    best = min(judged, key=lambda each: (each.cost, each.order))
    return best if best.cost < inf else None


def encode(order: Sequence[int], count: int, chance: np.random.Generator) -> Floats:
    """Keys that decode to this order."""
    keys = np.empty((2, count))
    keys[0] = chance.random(count) * 0.5
    keys[1] = chance.random(count)
    keys[0, list(order)] = 0.5 + chance.random(len(order)) / 2
    keys[1, list(order)] = (np.arange(len(order)) + 0.5) / len(order)
    return keys


def decode(costs: OrderCosts, keys: Floats) -> list[int]:
    """Those whose first key says so, and more until all layers have room, in the order of their second keys."""
    ranked = np.argsort(-keys[0], kind="stable")
    enough = int(np.searchsorted(np.cumsum(costs.room[ranked]), costs.space.layers)) + 1
    wanted = max(enough, int((keys[0] >= 0.5).sum()))
    chosen = ranked[: min(wanted, costs.space.layers, costs.space.count)]
    return [int(i) for i in chosen[np.argsort(keys[1, chosen], kind="stable")]]


def _judge(costs: OrderCosts, keys: Floats, times_s: Floats) -> CountedOrder:
    return costs.judge(decode(costs, keys), times_s)


def _breed(keys: Floats, terms: Genetics, chance: np.random.Generator) -> Floats:
    born = terms.population - terms.best - terms.newborn
    better = keys[chance.integers(0, terms.best, born)]
    other = keys[chance.integers(0, len(keys), born)]
    return np.where(chance.random(better.shape) < _INHERITED, better, other)
