"""The order of machines round the ring from the driver and back, with the least time on the wire.

Exact by Held-Karp for few machines, nearest neighbour improved by 2-opt for many. Nodes are taken in the
order given, so equal input gives equal output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from shardcompute.control.placement.cost_model import Hops

EXACT_LIMIT = 10


class RingTable:
    """The shortest way from the driver through every subset of nodes to every last node of it."""

    def __init__(self, nodes: Sequence[str], hops: Hops) -> None:
        self._nodes = nodes
        count = len(nodes)
        steps = [[hops.seconds(a, b) for b in nodes] for a in nodes]
        self._returns = [hops.return_s(node) for node in nodes]
        self._cost = [[inf] * count for _ in range(1 << count)]
        self._before = [[-1] * count for _ in range(1 << count)]
        for last in range(count):
            self._cost[1 << last][last] = hops.entry_s(nodes[last])
        for mask in range(1, 1 << count):
            costs = self._cost[mask]
            inside = [i for i in range(count) if costs[i] < inf]
            for after in range(count):
                if mask >> after & 1 or not inside:
                    continue
                cost, before = min((costs[i] + steps[i][after], i) for i in inside)
                self._cost[mask | 1 << after][after] = cost
                self._before[mask | 1 << after][after] = before

    def ends(self) -> Iterator[tuple[int, int, float]]:
        """Every (subset, last node, seconds round the ring) that has open links all the way."""
        for mask in range(1, len(self._cost)):
            for last, cost in enumerate(self._cost[mask]):
                if cost + self._returns[last] < inf:
                    yield mask, last, cost + self._returns[last]

    def order(self, mask: int, last: int) -> list[str]:
        order: list[str] = []
        while last >= 0:
            order.append(self._nodes[last])
            mask, last = mask & ~(1 << last), self._before[mask][last]
        order.reverse()
        return order


def choose_order(nodes: Sequence[str], hops: Hops, exact_limit: int = EXACT_LIMIT) -> list[str] | None:
    """All these nodes in the order with the shortest ring; None when closed links leave none, or, beyond the exact
    limit, where none was found."""
    if len(nodes) <= exact_limit:
        table = RingTable(nodes, hops)
        whole = (1 << len(nodes)) - 1
        ends = [(cost, last) for mask, last, cost in table.ends() if mask == whole]
        return table.order(whole, min(ends)[1]) if ends else None
    order = _improve(_nearest_first(nodes, hops), hops)
    return order if hops.ring_s(order) < inf else None


def _nearest_first(nodes: Sequence[str], hops: Hops) -> list[str]:
    left = list(nodes)
    order = [min(left, key=hops.entry_s)]
    left.remove(order[0])
    while left:
        order.append(min(left, key=lambda node: hops.seconds(order[-1], node)))
        left.remove(order[-1])
    return order


def _improve(order: list[str], hops: Hops) -> list[str]:
    """Turn pieces round while that shortens the ring."""
    count = len(order)
    has_improved = True
    while has_improved:
        has_improved = False
        for i in range(count - 1):
            for j in range(i + 1, count):
                if _gain_of_turning(order, i, j, hops) > 1e-12:
                    order[i : j + 1] = reversed(order[i : j + 1])
                    has_improved = True
    return order


def _gain_of_turning(order: Sequence[str], i: int, j: int, hops: Hops) -> float:
    def into(node: str) -> float:
        return hops.entry_s(node) if i == 0 else hops.seconds(order[i - 1], node)

    def out_of(node: str) -> float:
        return hops.return_s(node) if j == len(order) - 1 else hops.seconds(node, order[j + 1])

    now_s = into(order[i]) + out_of(order[j])
    then_s = into(order[j]) + out_of(order[i])
    # Infinity minus infinity is no gain.
    return 0.0 if then_s == inf else now_s - then_s
