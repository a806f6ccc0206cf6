"""Which machines serve which layers: filter, then score, and say why in words.

`place` is a pure function of its request, remembered for equal requests; ties go to fewer machines, then to
smaller ids. A machine that would not pay for its hops is left out with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.cost_model import hops_of, stage_s
from shardcompute.control.placement.cuts import fill
from shardcompute.control.placement.islands import asked_groups, ways_to_group
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.placement.rank_groups import offers_of, rank_shortage
from shardcompute.control.placement.search import QUICK_WORK, Found, Search, filling_orders
from shardcompute.control.sizes import HeldSums, StageBytes, sums_of, usual_holding
from shardcompute.control.state import Assignment, RankSeat
from shardcompute.core.units import count_of, format_bytes, format_rate
from shardcompute.models.tensor_share import Exchange

_EXPLAINED = 8
"""Of so many machines that are left out it is computed what would be with them."""


@dataclass(frozen=True, slots=True)
class PlacedStage:
    node: str
    start: int
    stop: int
    held: StageBytes
    """Of all that compute it, together."""
    step_s: float
    """Predicted time of one row."""
    ranks: tuple[RankSeat, ...] = ()
    """Where several compute it together: who, the leading one first."""
    exchange: Exchange = "gather"

    @property
    def memory_bytes(self) -> int:
        return self.held.total_bytes

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.node, self.start, self.stop, self.ranks, self.exchange)


@dataclass(frozen=True, slots=True)
class Placement:
    stages: tuple[PlacedStage, ...]
    predicted_tokens_per_s_one_stream: float
    predicted_tokens_per_s_many: float
    hops_s: float
    """Time of one token on the wire, all the way round."""
    score: float
    reasons: tuple[str, ...]
    unused: tuple[tuple[str, str], ...]
    """(node, why it was left out)"""
    standbys: tuple[Assignment, ...]
    is_final: bool = True
    """A thorough search would find nothing better."""

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        return tuple(stage.assignment for stage in self.stages)

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(node for stage in self.stages for node in stage.assignment.members)


@dataclass(frozen=True, slots=True)
class Unplaceable:
    missing_bytes: int
    """One more machine that offers this much would do."""
    reasons: tuple[str, ...]


@lru_cache(maxsize=128)
def place(request: Request, max_machines: int | None = None) -> Placement | Unplaceable:
    """A good placement over the machines offered, found quickly: the best one of up to five. Standbys are used only
    where nothing else serves, and as many stages as were asked for where that can be."""
    return _place(request, max_machines, is_quick=True)


def place_thoroughly(
    request: Request, should_stop: Callable[[], bool] = lambda: False
) -> Placement | Unplaceable:
    """The best placement that is found in as much time as it takes, or until it should stop."""
    return _place(request, None, is_quick=False, should_stop=should_stop)


def _place(
    request: Request,
    max_machines: int | None,
    *,
    is_quick: bool,
    should_stop: Callable[[], bool] = lambda: False,
) -> Placement | Unplaceable:
    request = replace(request, offers=tuple(sorted(request.offers, key=lambda offer: offer.node)))
    able, refused = _filter(request)
    regulars = tuple(offer for offer in able if not offer.is_standby)
    max_machines = 1 if request.model.is_whole else max_machines
    passes = (regulars, able) if len(regulars) < len(able) else (able,)

    def search(
        offers: tuple[NodeCapacity, ...], exactly: int | None, quick_work: int = QUICK_WORK
    ) -> Search | None:
        if not offers:
            return None
        found = Search(
            replace(request, offers=offers),
            exactly or max_machines,
            exactly or 1,
            is_quick=is_quick,
            quick_work=quick_work,
            should_stop=should_stop,
        )
        return found if found.run() is not None else None

    asked = request.parallel
    for offers in passes if asked.tp > 1 else ():
        ways = asked_groups(request, offers, asked.tp, asked.exchange)
        done = [done for way in ways if (done := search(way, asked.pp or None)) is not None]
        if done:
            return _describe(request, min(done, key=_rank_of), able, refused)
    most = max_machines or len(able)
    for exactly in (*([asked.pp] if 0 < asked.pp <= most else []), None):
        for offers in passes:
            plain = search(offers, exactly)
            if plain is None:
                continue
            if asked.tp == 0:
                plain = _with_islands(request, plain, search, offers)
            return _describe(request, plain, able, refused)
    return _explain_failure(request, able, refused, max_machines)


def usable_offers(request: Request) -> tuple[NodeCapacity, ...]:
    """Machines that can hold some of the model: without standbys, as long as there are others."""
    able, _ = _filter(replace(request, offers=tuple(sorted(request.offers, key=lambda offer: offer.node))))
    return tuple(offer for offer in able if not offer.is_standby) or able


def offers_for(request: Request, used: Container[str]) -> tuple[NodeCapacity, ...]:
    """The machines among which these were chosen: standbys only where some of them are."""
    able, _ = _filter(replace(request, offers=tuple(sorted(request.offers, key=lambda offer: offer.node))))
    regulars = tuple(offer for offer in able if not offer.is_standby)
    return able if any(offer.is_standby and offer.node in used for offer in able) else regulars


def _rank_of(search: Search) -> tuple[float, int, tuple[str, ...]]:
    assert search.best is not None
    return search.best.rank


def _with_islands(
    request: Request,
    plain: Search,
    search: Callable[[tuple[NodeCapacity, ...], int | None, int], Search | None],
    offers: tuple[NodeCapacity, ...],
) -> Search:
    """The best with groups of machines that compute together, where that is clearly better than without."""
    assert plain.best is not None
    best, least = plain, plain.best.worth.score * (1 + request.policy.tensor_min_gain)
    for way in ways_to_group(replace(request, offers=offers), offers):
        found = search(way, None, QUICK_WORK // 4)
        if found is None or found.best is None:
            continue
        if found.best.worth.score >= least and found.best.rank < _rank_of(best):
            best = found
    return best


def _filter(request: Request) -> tuple[tuple[NodeCapacity, ...], list[tuple[str, str]]]:
    """Machines that can hold at least the smallest layer, and why the others cannot."""
    sizes = request.sizes
    least = {
        holding: _smallest_layer(sizes.on(holding)) for holding in {each.holding for each in request.offers}
    }
    able, refused = [], list(request.unfit)
    for offer in request.offers:
        smallest = least[offer.holding]
        if offer.memory_bytes >= smallest:
            able.append(offer)
        else:
            need, has = format_bytes(smallest), format_bytes(offer.memory_bytes)
            refused.append((offer.node, f"too small: one layer needs {need}, it offers {has}"))
    return tuple(able), refused


def _smallest_layer(held: HeldSums) -> int:
    return held.overhead_bytes + min(after - before for before, after in pairwise(held.memory_before))


def _describe(
    request: Request,
    search: Search,
    able: tuple[NodeCapacity, ...],
    refused: list[tuple[str, str]],
) -> Placement:
    found, offers = search.best, offers_of(request)
    assert found is not None
    stages = tuple(
        PlacedStage(
            each.node,
            each.start,
            each.stop,
            held_by_members(request, each),
            stage_s(request.sizes, offers[each], each.start, each.stop),
            each.ranks,
            each.exchange,
        )
        for each in found.stages
    )
    used = {node for each in found.stages for node in each.members}
    spare = [offer for offer in able if offer.node not in used]
    unused = [(offer.node, _why_left_out(request, search, offer)) for offer in spare[:_EXPLAINED]]
    unused += [(offer.node, "the machines that were chosen do without it") for offer in spare[_EXPLAINED:]]
    return Placement(
        stages=stages,
        predicted_tokens_per_s_one_stream=found.worth.one_stream,
        predicted_tokens_per_s_many=found.worth.many_streams,
        hops_s=hops_of(request).ring_s([stage.node for stage in stages]),
        score=found.worth.score,
        reasons=(*_filter_words(request, able, refused), *_score_words(search, found)),
        unused=tuple(sorted([*refused, *unused])),
        standbys=choose_standbys(request, found.stages, spare),
        is_final=not search.was_cut_short,
    )


def held_by_members(request: Request, stage: Assignment) -> StageBytes:
    """What a stage takes on all that compute it."""
    machines = {offer.node: offer for offer in request.offers}
    parts = [
        sums_of(request.model, machines[node].holding, stage.place_of(node)).parts(stage.start, stage.stop)
        for node in stage.members
    ]
    return StageBytes(
        sum(each.weights_bytes for each in parts),
        sum(each.scratch_bytes for each in parts),
        sum(each.kv_bytes for each in parts),
        sum(each.log_bytes for each in parts),
    )


def asked_in_words(asked: Parallelism) -> str:
    """Such as "3 stages", or "2 ranks in each of 3 stages"."""
    stages = count_of(asked.pp, "stage")
    if asked.tp == 1:
        return stages if asked.pp else "machines that compute alone"
    ranks = count_of(asked.tp, "rank")
    return f"{ranks} in each of {stages}" if asked.pp else f"{ranks} in each stage"


def _filter_words(
    request: Request, able: tuple[NodeCapacity, ...], refused: list[tuple[str, str]]
) -> tuple[str, ...]:
    need = _whole_bytes(request, able)
    room = sum(offer.memory_bytes for offer in able)
    asked = (f"asked for: {asked_in_words(request.parallel)}",) if request.parallel.is_shaped else ()
    first = (
        f"filter: {request.model.name} needs {format_bytes(need)}, "
        f"{count_of(len(able), 'machine')} offer {format_bytes(room)}"
    )
    missing = rank_shortage(request, able)
    if missing:
        asked = (*asked, f"that cannot be had: {missing}")
    limited = (
        f"filter: {offer.node} is on probation: a few inner layers, {format_bytes(offer.memory_bytes)} at most"
        for offer in able
        if offer.is_inner
    )
    return (*asked, first, *limited, *(f"filter: {node} is {why}" for node, why in refused))


def _whole_bytes(request: Request, able: tuple[NodeCapacity, ...]) -> int:
    """What all of the model would take on one machine like most of these."""
    offers = able or request.offers
    return request.sizes.on(usual_holding(offer.holding for offer in offers)).total_bytes


def _score_words(search: Search, found: Found) -> list[str]:
    words = []
    for count in sorted(search.best_by_count):
        best = search.best_by_count[count]
        mark = " ← chosen" if best.stages == found.stages else ""
        machines = sum(len(stage.members) for stage in best.stages)
        together = f" as {count_of(count, 'stage')}" if machines > count else ""
        words.append(
            f"score: {count_of(machines, 'machine')}{together}: {format_rate(best.worth.one_stream)} for one stream, "
            f"{format_rate(best.worth.many_streams)} for many{mark}"
        )
    return words


def _why_left_out(request: Request, search: Search, extra: NodeCapacity) -> str:
    """What the chosen placement would become with this machine where it is nearest."""
    found, asked = search.best, request.parallel
    assert found is not None
    if asked.tp > 1 and all(stage.ranks for stage in found.stages):
        return f"{asked} was asked for, and it would compute alone"
    if len(found.stages) >= request.sizes.layer_count:
        return "every layer has a machine of its own already"
    with_it = search.with_one_more(extra)
    if with_it is None:
        return "it cannot be reached from the others, or no cut fits with it"
    if extra.is_standby:
        return "kept as standby"
    return (
        f"with it one stream would go from {format_rate(found.worth.one_stream)} "
        f"to {format_rate(with_it.one_stream)}, many from {format_rate(found.worth.many_streams)} "
        f"to {format_rate(with_it.many_streams)}: that does not pay"
    )


def _explain_failure(
    request: Request,
    able: tuple[NodeCapacity, ...],
    refused: list[tuple[str, str]],
    max_machines: int | None,
) -> Unplaceable:
    reasons = list(_filter_words(request, able, refused))
    usual = usual_holding(offer.holding for offer in able or request.offers)
    left_over = min((fill(order, request.sizes, usual)[1] for order in filling_orders(able)), default=None)
    if request.model.is_whole and able:
        held = [request.sizes.on(offer.holding).total_bytes - offer.memory_bytes for offer in able]
        why = "its layers share more than rows, so that one machine must hold all of it"
        return Unplaceable(max(1, min(held)), (*reasons, why))
    if left_over is None:
        return Unplaceable(_whole_bytes(request, able), (*reasons, "no machine can take part"))
    if left_over == 0:
        limit = f"at most {count_of(max_machines, 'machine')} allowed" if max_machines else "links are closed"
        return Unplaceable(_whole_bytes(request, able), (*reasons, f"memory suffices, but {limit}"))
    return Unplaceable(left_over, (*reasons, f"{format_bytes(left_over)} more are needed on one machine"))


def choose_standbys(
    request: Request,
    stages: Iterable[Assignment],
    spare: Iterable[NodeCapacity],
    current: Iterable[Assignment] = (),
) -> tuple[Assignment, ...]:
    """One stage for each spare machine to hold ready: the one that it holds, else the largest that fits and that no
    other covers. Nobody waits for a machine on probation."""
    sizes, offers = request.sizes, {offer.node: offer for offer in spare if not offer.is_inner}
    usual = sizes.on(usual_holding(offer.holding for offer in offers.values()))
    open_stages = sorted(
        stages, key=lambda stage: (-usual.memory_bytes(stage.start, stage.stop), stage.start)
    )

    def take(offer: NodeCapacity, wanted: Iterable[tuple[int, int]]) -> Assignment | None:
        """The first of the open stages with one of these ranges that fits."""
        for stage in open_stages:
            span = (stage.start, stage.stop)
            if span in wanted and sizes.on(offer.holding).memory_bytes(*span) <= offer.memory_bytes:
                open_stages.remove(stage)
                return Assignment(offer.node, *span)
        return None

    chosen = []
    for each in current:
        kept = take(offers[each.node], [(each.start, each.stop)]) if each.node in offers else None
        if kept is not None:
            chosen.append(kept)
            del offers[each.node]
    for offer in sorted(offers.values(), key=lambda offer: (not offer.is_standby, offer.node)):
        taken = take(offer, [(stage.start, stage.stop) for stage in open_stages])
        if taken is not None:
            chosen.append(taken)
    return tuple(chosen)


def place_chains(request: Request, count: int) -> list[Placement | Unplaceable]:
    """Up to `count` whole copies of the model on machines of their own; the last entry may say what is missing.

    The first copy uses fewer machines than it would like if that leaves enough for the others.
    """
    best = [place(request)]
    first = best[0]
    if count == 1 or isinstance(first, Unplaceable):
        return best
    for limit in range(len(first.stages), 0, -1):
        leading = place(request, limit)
        if isinstance(leading, Unplaceable):
            break
        others = tuple(offer for offer in request.offers if offer.node not in leading.nodes)
        placements = [leading, *place_chains(replace(request, offers=others), count - 1)]
        if _copies(placements) > _copies(best) or len(best) == 1:
            best = placements
        if _copies(best) == count:
            break
    return best


def _copies(placements: list[Placement | Unplaceable]) -> int:
    return sum(isinstance(placement, Placement) for placement in placements)
