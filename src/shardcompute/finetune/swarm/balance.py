"""Where a model is cut for a run: so that no stage has much more to compute than the others.

The slowest stage sets the pace, and the last one has the head besides its layers: of a small model with a large
vocabulary that is as much as several layers. What is learned has the same bits wherever it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from shardcompute.models.layout import Layout
from shardcompute.models.spec import ModelSpec, Stage

_HEAD_SPEED = 0.87


def layer_costs(layout: Layout) -> tuple[float, ...]:
    """What a token costs in each layer, as numbers that it is multiplied with."""
    return tuple(
        float(sum(math.prod(place.shape) for place in layer.values() if len(place.shape) == 2))
        for layer in layout.layers
    )


def head_cost(spec: ModelSpec, learned_share: float) -> float:
    """Of the head, by the same measure: logits are made of tokens that are learned alone. One large product is faster
    than many small ones."""
    return _HEAD_SPEED * spec.vocab_size * spec.hidden * learned_share


def balance_stages(costs: Sequence[float], head: float, count: int) -> list[Stage]:
    """Layers of these costs in `count` stages, the last with the head, whose most costly is as cheap as can be."""
    layers = len(costs)
    sums = (0.0, *accumulate(costs))
    # By how many stages there were: the least that the most costly can be up to each layer, and where it is cut then.
    best = [0.0] + [math.inf] * layers
    cuts: list[list[int]] = []
    for stage in range(1, count + 1):
        extra = head if stage == count else 0.0
        found, where = [math.inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(stage, layers - (count - stage) + 1):
            for start in range(stage - 1, stop):
                worst = max(best[start], sums[stop] - sums[start] + extra)
                if worst < found[stop]:
                    found[stop], where[stop] = worst, start
        best = found
        cuts.append(where)
    edges = [layers]
    for where in reversed(cuts):
        edges.append(where[edges[-1]])
    return [Stage(start, stop, layers) for start, stop in pairwise(reversed(edges))]
