"""Alternatives of a placement: what one machine, a pipeline, ranks, and both together would do, whatever is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.islands import asked_groups, ways_to_group
from shardcompute.control.placement.place import Placement, usable_offers
from shardcompute.control.placement.search import QUICK_WORK, Found, Search
from shardcompute.control.state import Assignment
from shardcompute.core.units import format_rate

AlternativeKind = Literal["one machine", "pipeline", "tensor", "tensor and pipeline"]
KINDS: tuple[AlternativeKind, ...] = ("one machine", "pipeline", "tensor", "tensor and pipeline")
_GROUP_SIZES = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best layout of its kind that was found."""

    kind: AlternativeKind
    stages: tuple[Assignment, ...]
    one_stream: float
    """Tokens a second, predicted, as `many_streams` for enough of them to fill the pipe."""
    many_streams: float
    score: float
    is_chosen: bool = False

    @property
    def token_s(self) -> float:
        """Predicted time of one token of one stream."""
        return 1 / self.one_stream


def kind_of(stages: tuple[Assignment, ...]) -> AlternativeKind:
    if any(stage.ranks for stage in stages):
        return "tensor" if len(stages) == 1 else "tensor and pipeline"
    return "one machine" if len(stages) == 1 else "pipeline"


def weigh_alternatives(request: Request, chosen: Placement) -> tuple[Alternative, ...]:
    """By kind, those that are possible. Groups are weighed even where they do not pay, or where nobody measured."""
    found: dict[AlternativeKind, Found] = {}
    for each in _layouts(request):
        kind = kind_of(each.stages)
        if kind not in found or each.rank < found[kind].rank:
            found[kind] = each
    kind = kind_of(chosen.assignments)
    told = {
        kind: Alternative(kind, each.stages, each.worth.one_stream, each.worth.many_streams, each.worth.score)
        for kind, each in found.items()
    }
    told[kind] = Alternative(
        kind,
        chosen.assignments,
        chosen.predicted_tokens_per_s_one_stream,
        chosen.predicted_tokens_per_s_many,
        chosen.score,
        is_chosen=True,
    )
    return tuple(told[kind] for kind in KINDS if kind in told)


def _layouts(request: Request) -> Iterator[Found]:
    offers = usable_offers(request)
    yield from _searched(request, offers, 1, 1)
    if not request.model.is_whole and len(offers) > 1:
        yield from _searched(request, offers, None, 2)
    if request.model.tensor is None:
        return
    exchange = request.parallel.exchange
    sizes = sorted({size for size in (*_GROUP_SIZES, request.parallel.tp) if 1 < size <= len(offers)})
    ways = [*ways_to_group(replace(request, offers=offers), offers)]
    ways += [way for size in sizes for way in asked_groups(request, offers, size, exchange)]
    for way in dict.fromkeys(ways):
        yield from _searched(request, tuple(offer for offer in way if offer.ranks), 1, 1)
        if len(way) > 1:
            yield from (
                each for each in _searched(request, way, None, 2) if any(s.ranks for s in each.stages)
            )


def _searched(
    request: Request, offers: tuple[NodeCapacity, ...], most: int | None, least: int
) -> Iterator[Found]:
    if len(offers) >= least:
        search = Search(
            replace(request, offers=offers), most, least, is_quick=True, quick_work=QUICK_WORK // 4
        )
        found = search.run()
        if found is not None:
            yield found


def reason_of_choice(request: Request, alternatives: tuple[Alternative, ...]) -> str:
    """Why the chosen one was, against the best of the others."""
    chosen = next(each for each in alternatives if each.is_chosen)
    others = [each for each in alternatives if not each.is_chosen]
    if not others:
        return f"{chosen.kind}: there is nothing else"
    best = max(others, key=lambda each: each.score)
    gain = chosen.score / best.score - 1
    told = (
        f"{format_rate(chosen.one_stream)} instead of {format_rate(best.one_stream)} for one stream, "
        f"{format_rate(chosen.many_streams)} instead of {format_rate(best.many_streams)} for many"
    )
    if gain >= 0:
        return f"{chosen.kind}, worth {gain:.0%} more than {best.kind}: {told}"
    return f"{chosen.kind}, worth {-gain:.0%} less than {best.kind} ({_why_not(request, best)}): {told}"


def _why_not(request: Request, best: Alternative) -> str:
    """Why what would be worth more is not taken."""
    asked, has_ranks = request.parallel, any(stage.ranks for stage in best.stages)
    if has_ranks and asked.tp == 1:
        return "it was not asked for: --parallel auto"
    if asked.is_shaped:
        return f"{asked} was asked for"
    if has_ranks:
        offers = {offer.node: offer for offer in request.offers}
        members = [node for stage in best.stages for node in stage.members]
        if not all(offers[node].is_measured for node in members):
            return "not all of its machines have been measured"
        return "what nobody has tried has to gain more, over links that were measured"
    return "a quick search did not find it"
