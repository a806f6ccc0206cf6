"""Islands: machines so close to each other that it may pay to have them compute every layer together.

Gives placement a few ways to take machines together, each as offers in which a group stands in its members' place, so
that the search over stages is the same with and without. Where nothing was measured, nobody is taken together, unless
a person asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, log2

from shardcompute.backends.exactness import parse_class
from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.rank_groups import OfferTable, offers_of, seat_ranks
from shardcompute.control.state import RankSeat
from shardcompute.models.tensor_share import Exchange

Offers = tuple[NodeCapacity, ...]
_LARGEST_ISLAND = 8
"""More ranks than these never paid where it was measured; a person may ask for them."""
_MOST_WAYS = 3
_NEAR_S = 25e-6
"""Round trips shorter than this are all alike, and so are those that differ by less than half of them."""


def ways_to_group(request: Request, offers: Offers) -> list[Offers]:
    """Offers with groups that are quicker than each of their members would be alone, in a few combinations, the most
    promising first. What was not measured is left as it is, and so are those who would give other tokens together."""
    able = [offer for offer in offers if offer.is_measured and _keeps_tokens(offer.rank_class)]
    if request.model.tensor is None or len(able) < 2:
        return []
    table = offers_of(request)
    found = _groups_that_pay(table, able)
    ways = [_disjoint(found)]
    ways += [_disjoint([each for each in found if len(each.seats) == ranks]) for ranks in _sizes(found)]
    ways += [way[:1] for way in ways]
    ways = sorted(dict.fromkeys(way for way in ways if way), key=lambda way: [each.cost for each in way])
    made = [[table.group(each.seats, "gather") for each in way] for way in ways[:_MOST_WAYS]]
    return [_with_groups(offers, tuple(group for group in way if group is not None)) for way in made]


def asked_groups(request: Request, offers: Offers, ranks: int, exchange: Exchange) -> Iterator[Offers]:
    """Groups of exactly so many ranks, nothing else: of those that are near each other, or have like memory."""
    table = offers_of(request)
    able = [offer for offer in offers if offer.rank_class]
    by_memory = sorted(able, key=lambda offer: (offer.rank_class, -offer.memory_bytes, offer.node))
    seen: set[Offers] = set()
    for way in (_nearest_groups(table, able, ranks, exchange), _in_order(table, by_memory, ranks, exchange)):
        groups = tuple(way)
        if groups and groups not in seen:
            seen.add(groups)
            yield groups


def _keeps_tokens(rank_class: str) -> bool:
    known = parse_class(rank_class) if rank_class else None
    return known is not None and known.has_exact_ranks


@dataclass(frozen=True, slots=True)
class _Island:
    """Machines that would compute together, and seconds for each byte of the model's weights."""

    cost: float
    seats: tuple[RankSeat, ...]


def _groups_that_pay(table: OfferTable, able: Sequence[NodeCapacity]) -> list[_Island]:
    """By speed: of every machine with so many of its nearest, for every number of them."""
    found: dict[tuple[RankSeat, ...], _Island] = {}
    for seed in able:
        near = _by_distance(table, seed, able, is_measured=True)[: _LARGEST_ISLAND - 1]
        for ranks in range(2, len(near) + 2):
            members = [seed, *near[: ranks - 1]]
            seats = seat_ranks(members)
            if not _are_measured(table, seats):
                break
            cost = inf if seats in found else table.seconds_per_byte(seats, "gather")
            if cost < min(offer.seconds_per_byte for offer in members):
                found[seats] = _Island(cost, seats)
    return sorted(found.values(), key=lambda each: (each.cost, [seat.node for seat in each.seats]))


def _are_measured(table: OfferTable, seats: Sequence[RankSeat]) -> bool:
    pairs = combinations([seat.node for seat in seats], 2)
    return all(table.line(a, b) is not None for a, b in pairs)


def _by_distance(
    table: OfferTable, seed: NodeCapacity, offers: Sequence[NodeCapacity], *, is_measured: bool
) -> list[NodeCapacity]:
    """Others of its class: the nearest first and, of those that are as near, the quickest."""

    def distance(offer: NodeCapacity) -> tuple[float, float, str]:
        line = table.line(seed.node, offer.node)
        steps = inf if line is None else round(2 * log2(max(line.rtt_s, _NEAR_S) / _NEAR_S)) / 2
        return steps, offer.seconds_per_byte, offer.node

    alike = [
        offer
        for offer in offers
        if offer.node != seed.node
        and offer.rank_class == seed.rank_class
        and (not is_measured or table.line(seed.node, offer.node) is not None)
    ]
    return sorted(alike, key=distance)


def _sizes(islands: Sequence[_Island]) -> list[int]:
    return sorted({len(each.seats) for each in islands})


def _disjoint(islands: Sequence[_Island]) -> tuple[_Island, ...]:
    """As they come, without those whose members are taken."""
    taken: set[str] = set()
    chosen = []
    for each in islands:
        members = {seat.node for seat in each.seats}
        if taken.isdisjoint(members):
            taken |= members
            chosen.append(each)
    return tuple(chosen)


def _with_groups(offers: Offers, groups: Offers) -> Offers:
    taken = {node for group in groups for node in group.members}
    alone = (offer for offer in offers if offer.node not in taken)
    return tuple(sorted((*groups, *alone), key=lambda offer: offer.node))


def _nearest_groups(
    table: OfferTable, able: Sequence[NodeCapacity], ranks: int, exchange: Exchange
) -> Iterator[NodeCapacity]:
    """Always the quickest group that is left."""
    left = list(able)
    while len(left) >= ranks:
        groups = []
        for seed in left:
            near = _by_distance(table, seed, left, is_measured=False)
            if len(near) >= ranks - 1:
                group = table.group(seat_ranks([seed, *near[: ranks - 1]]), exchange)
                groups += [group] if group is not None else []
        if not groups:
            return
        best = min(groups, key=lambda group: (group.seconds_per_byte, group.members))
        yield best
        left = [offer for offer in left if offer.node not in best.members]


def _in_order(
    table: OfferTable, ordered: Sequence[NodeCapacity], ranks: int, exchange: Exchange
) -> Iterator[NodeCapacity]:
    """Neighbours of a list, where they are of one class."""
    for start in range(0, len(ordered) - ranks + 1, ranks):
        members = ordered[start : start + ranks]
        if len({offer.rank_class for offer in members}) == 1:
            group = table.group(seat_ranks(members), exchange)
            if group is not None:
                yield group
