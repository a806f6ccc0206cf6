"""Where to cut a model over machines in a given order: plain arithmetic on prefix sums.

A tuple of edges `(0, …, layer_count)` says that machine i gets `[edges[i], edges[i + 1])`; each gets at least
one layer, the first also the embedding, the last also the head, and none more than its memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import inf

from shardcompute.control.placement.capacities import NodeCapacity
from shardcompute.control.placement.cost_model import stage_s
from shardcompute.control.sizes import Sizes

_SLACK = 1 + 1e-9
"""So that a bound which was itself a stage's time admits that stage in spite of rounding."""


def slowest_s(order: Sequence[NodeCapacity], sizes: Sizes, edges: Sequence[int]) -> float:
    return max(stage_s(sizes, offer, edges[i], edges[i + 1]) for i, offer in enumerate(order))


def cut_within(order: Sequence[NodeCapacity], sizes: Sizes, bound_s: float) -> tuple[int, ...] | None:
    """Edges with every stage within `bound_s` and memory, if there are any: each machine takes all it can.

    Taking more leaves less to those that follow, so where the last one has too much no cut exists. But a
    machine may be too small for just that layer at which the one before it stopped; only then all are tried.
    """
    count, layers = len(order), sizes.layer_count
    edges = [0]
    for i, offer in enumerate(order[:-1]):
        start = edges[-1]
        held = sizes.on(offer.holding)
        room = offer.memory_bytes - held.overhead_bytes - (held.embedding_bytes if i == 0 else 0)
        by_memory = bisect_right(held.memory_before, held.memory_before[start] + room) - 1
        by_time = bisect_right(sizes.work_before, sizes.work_before[start] + _work(offer, bound_s)) - 1
        stop = min(by_memory, by_time, layers - (count - 1 - i))
        if stop <= start:
            return None if sizes.is_uniform else cut_for_latency(order, sizes, bound_s)
        edges.append(stop)
    start, last = edges[-1], order[-1]
    if start >= layers or sizes.on(last.holding).memory_bytes(start, layers) > last.memory_bytes:
        return None
    if sizes.work_bytes(start, layers) > _work(last, bound_s):
        return None
    return (*edges, layers)


def _work(offer: NodeCapacity, bound_s: float) -> float:
    """How many bytes this machine reads within the bound."""
    return (bound_s - offer.overhead_s) / offer.seconds_per_byte * _SLACK


def cut_for_throughput(order: Sequence[NodeCapacity], sizes: Sizes) -> tuple[int, ...] | None:
    """The edges whose slowest stage is fastest, by bisection; None when memory does not suffice."""
    best = cut_within(order, sizes, inf)
    if best is None:
        return None
    low, high = 0.0, slowest_s(order, sizes, best)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        edges = cut_within(order, sizes, middle)
        if edges is None:
            low = middle
        else:
            best, high = edges, min(middle, slowest_s(order, sizes, edges))
    return best


def cut_for_latency(
    order: Sequence[NodeCapacity], sizes: Sizes, bound_s: float = inf
) -> tuple[int, ...] | None:
    """The edges with the smallest sum of stage times, none above `bound_s`; None when there are none.

    A stage's time is linear in prefix sums, so the best start for each stop is a minimum over a window that
    only slides forward: linear in layers times machines.
    """
    count, layers, work = len(order), sizes.layer_count, sizes.work_before
    best = [inf] * (layers + 1)
    best[0] = 0.0
    origins: list[list[int]] = []
    for i, offer in enumerate(order):
        is_last = i == count - 1
        held = sizes.on(offer.holding)
        extra = (held.embedding_bytes if i == 0 else 0) + (held.head_bytes if is_last else 0)
        room = offer.memory_bytes - held.overhead_bytes - extra
        room += held.shared_bytes if count == 1 else 0
        limit = _work(offer, bound_s) - (sizes.head_bytes if is_last else 0)
        following, origin = [inf] * (layers + 1), [-1] * (layers + 1)
        window: deque[tuple[float, int]] = deque()
        entered = i
        for stop in range(layers if is_last else i + 1, layers - (count - 1 - i) + 1):
            while entered < stop:
                value = best[entered] - offer.seconds_per_byte * work[entered]
                while window and window[-1][0] > value:
                    window.pop()
                window.append((value, entered))
                entered += 1
            while window and not (
                held.memory_before[stop] - held.memory_before[window[0][1]] <= room
                and work[stop] - work[window[0][1]] <= limit
            ):
                window.popleft()
            if window and window[0][0] < inf:
                value, origin[stop] = window[0]
                following[stop] = value + offer.overhead_s + offer.seconds_per_byte * work[stop]
        best = following
        origins.append(origin)
    return _trace(origins, layers) if best[layers] < inf else None


def _trace(origins: Sequence[Sequence[int]], layers: int) -> tuple[int, ...]:
    edges = [layers]
    for origin in reversed(origins):
        edges.append(origin[edges[-1]])
    return tuple(reversed(edges))


def fill(
    order: Sequence[NodeCapacity], sizes: Sizes, holding: str = ""
) -> tuple[list[tuple[NodeCapacity, int, int]], int]:
    """Each machine in turn takes all it can: the stages, and the bytes that one more machine, of this holding, would
    have to hold.

    Nothing is left over exactly when the stages are the whole model.
    """
    stages: list[tuple[NodeCapacity, int, int]] = []
    start, layers = 0, sizes.layer_count
    for offer in order:
        held = sizes.on(offer.holding)
        room = offer.memory_bytes - held.overhead_bytes - (held.embedding_bytes if start == 0 else 0)
        stop = bisect_right(held.memory_before, held.memory_before[start] + room) - 1
        if held.memory_bytes(start, layers) <= offer.memory_bytes:
            return [*stages, (offer, start, layers)], 0
        # The head does not fit here, so it needs a layer to go with elsewhere.
        stop = min(stop, layers - 1)
        if stop > start:
            stages.append((offer, start, stop))
            start = stop
    return stages, sizes.on(holding).memory_bytes(start, layers)
