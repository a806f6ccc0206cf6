"""What a placement costs: hops from machine to machine, stages on them, and what all of it is worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.link_tables import link_table
from shardcompute.control.placement.rank_groups import offers_of
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.sizes import Sizes
from shardcompute.control.state import Assignment, MeasuredLink


class Hops:
    """Seconds for one row from node to node; a link that is not open costs infinity."""

    def __init__(
        self, links: Iterable[MeasuredLink], driver: str, frame_bytes: int, policy: PlacementPolicy
    ) -> None:
        self._driver = driver
        self._links = link_table(tuple(links))
        self._default = MeasuredLink("", "", policy.default_rtt_s, policy.default_bytes_per_s)
        self._frame_bytes = frame_bytes
        self._seconds: dict[tuple[str, str], float] = {}
        """A search asks for the same hops thousands of times."""

    def _link(self, a: str, b: str) -> MeasuredLink:
        return self._links.find(a, b) or self._default

    def transfer_s(self, a: str, b: str) -> float:
        """How long a frame keeps the link busy."""
        return 0.0 if a == b else self._frame_bytes / self._link(a, b).bytes_per_s

    def seconds(self, a: str, b: str) -> float:
        known = self._seconds.get((a, b))
        if known is None:
            known = self._seconds[a, b] = self._seconds_of(a, b)
        return known

    def _seconds_of(self, a: str, b: str) -> float:
        if a == b:
            return 0.0
        link = self._link(a, b)
        return link.rtt_s / 2 + self.transfer_s(a, b) if link.is_open else inf

    def entry_s(self, node: str) -> float:
        return self.seconds(self._driver, node)

    def return_s(self, node: str) -> float:
        """The tail answers the driver with token ids, which weigh nothing."""
        if node == self._driver:
            return 0.0
        link = self._link(node, self._driver)
        return link.rtt_s / 2 if link.is_open else inf

    def ring_s(self, order: Sequence[str]) -> float:
        inner = sum(self.seconds(a, b) for a, b in pairwise(order))
        return self.entry_s(order[0]) + inner + self.return_s(order[-1])

    def nearest_link(self, order: Sequence[str], node: str) -> int:
        """Where in this order one more node makes the ring the shortest."""

        def detour_s(i: int) -> float:
            into = self.seconds(order[i - 1], node) if i else self.entry_s(node)
            out = self.seconds(node, order[i]) if i < len(order) else self.return_s(node)
            if i == 0:
                return into + out - self.entry_s(order[0])
            direct = self.seconds(order[i - 1], order[i]) if i < len(order) else self.return_s(order[-1])
            return into + out - direct

        return min(range(len(order) + 1), key=detour_s)

    def busiest_s(self, order: Sequence[str]) -> float:
        ring = [self._driver, *order]
        return max(self.transfer_s(a, b) for a, b in pairwise(ring))


@lru_cache(maxsize=64)
def hops_of(request: Request) -> Hops:
    frame_bytes = request.model.hidden * request.policy.activation_bytes
    return Hops(request.links, request.driver, frame_bytes, request.policy)


@dataclass(frozen=True, slots=True)
class Score:
    """What a placement is predicted to do."""

    latency_s: float
    """One token of one stream: all stages and all hops."""
    bottleneck_s: float
    """The slowest stage or link."""
    score: float

    @property
    def one_stream(self) -> float:
        return 1 / self.latency_s

    @property
    def many_streams(self) -> float:
        return 1 / self.bottleneck_s


def count_machines(offers: Iterable[NodeCapacity]) -> int:
    return sum(offer.machines for offer in offers)


def score_of(latency_s: float, bottleneck_s: float, machines: int, policy: PlacementPolicy) -> Score:
    # A clock cannot tell less than this, and zero would make everything else worthless.
    latency_s, bottleneck_s = max(latency_s, 1e-9), max(bottleneck_s, 1e-9)
    weight = policy.latency_weight
    score = latency_s**-weight * bottleneck_s ** (weight - 1) * (1 - policy.machine_price) ** (machines - 1)
    return Score(latency_s, bottleneck_s, score)


def stage_s(sizes: Sizes, offer: NodeCapacity, start: int, stop: int) -> float:
    """Seconds for one row through these layers on this machine."""
    return offer.overhead_s + offer.seconds_per_byte * sizes.work_bytes(start, stop)


def first_token_s(request: Request, stages: Sequence[Assignment], prompt_tokens: int) -> float | None:
    """Seconds until a prompt of so many tokens is through these stages, one after the other; None where the speed of
    one with prompts is not known."""
    offers, sizes = offers_of(request), request.sizes
    total_s = hops_of(request).ring_s([stage.node for stage in stages])
    for stage in stages:
        offer = offers[stage]
        if offer.prefill_seconds_per_byte is None:
            return None
        layers_bytes = sizes.work_before[stage.stop] - sizes.work_before[stage.start]
        head_bytes = sizes.work_bytes(stage.start, stage.stop) - layers_bytes
        total_s += offer.overhead_s + offer.seconds_per_byte * head_bytes
        total_s += prompt_tokens * offer.prefill_seconds_per_byte * layers_bytes
    return total_s


def score(request: Request, stages: Sequence[Assignment]) -> Score:
    """The worth of given stages; all their members must be among the offers. Ranks that cannot reach each other are
    worth nothing."""
    table = offers_of(request)
    offers = [table[stage] for stage in stages]
    times = [
        stage_s(request.sizes, offer, each.start, each.stop)
        for offer, each in zip(offers, stages, strict=True)
    ]
    order = [stage.node for stage in stages]
    hops = hops_of(request)
    bottleneck_s = max(*times, hops.busiest_s(order))
    return score_of(sum(times) + hops.ring_s(order), bottleneck_s, count_machines(offers), request.policy)
