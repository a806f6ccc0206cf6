"""Moves of chains that serve: off a machine that is to be emptied, to as many stages as a person asked for, or to a
layout that is clearly worth more than this one.

A move has a price: what must be fetched, and the pause of all streams. It must promise more than noise can, and more
with each move since the machines or models last changed (`Unrest`); a layout is kept for a while before it may move,
and an hour has so many moves. What was planned is carried through whatever is measured meanwhile, and judged once more
when it is ready; afterwards it is told what came of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import fmean

from shardcompute.control.actions import Action, SearchLayout
from shardcompute.control.events import ChainReshaped, Event, MoveDropped, MoveJudged, MovePlanned
from shardcompute.control.placement.capacities import Request
from shardcompute.control.placement.cost_model import Score, score
from shardcompute.control.placement.place import Placement, Unplaceable, asked_in_words, place
from shardcompute.control.placement.replacement import (
    Replacement,
    hand_over,
    is_possible,
    move_seconds,
    replace_stage,
)
from shardcompute.control.placement.request import placement_request
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.sizes import memory_of
from shardcompute.control.state import (
    Assignment,
    Chain,
    ClusterState,
    Move,
    MoveTarget,
    holds,
    is_loaded,
    is_waiting,
    loaded_standbys,
)
from shardcompute.control.transitions.state_updates import claimed_bytes
from shardcompute.control.wording import (
    change_in_words,
    layout_in_words,
    move_in_words,
    name_of,
    outcome_in_words,
)

_KEPT_GAIN = 0.5
"""A move that is ready is made if it still gains this part of what it had to promise."""
_SPARES = 16
"""So many machines are tried in the place of one stage, the fastest first."""


def which_move_is_over(state: ClusterState, now_s: float) -> Event | None:
    """Use what is loaded, or stay: where it cannot be any more, or is not worth it after all."""
    for chain in state.live_chains():
        target = chain.target
        if target is None or chain.status != "ready" or is_waiting(state, (*chain.stages, *target.stages)):
            continue
        problem = _why_not(state, chain, target, now_s)
        if problem:
            return MoveDropped(chain.id, chain.epoch, f"no move, {problem}", now_s)
        missing = _not_loaded(state, chain, target.stages)
        must_break = is_draining(state, chain) and not _fit_alongside(state, chain, missing)
        is_prepared = not missing and (target.has_kv or not state.placing.moves_kv)
        if is_prepared or must_break:
            return _conclude(state, chain, target, now_s)
    return None


def _why_not(state: ClusterState, chain: Chain, target: MoveTarget, now_s: float) -> str:
    """Why a chain cannot move as planned any more; empty where it can."""
    request = placement_request(state, state.models[chain.model].model, now_s, chain=chain)
    offers = {offer.node: offer for offer in request.offers}
    parts = [(node, stage) for stage in target.stages for node in stage.members]
    for node, stage in parts:
        offer = offers.get(node)
        if offer is None:
            return f"{name_of(state, node)} cannot take part now"
        if memory_of(state, request.model, stage, node) > offer.memory_bytes:
            return f"{name_of(state, node)} has too little memory left"
    if not isfinite(score(request, target.stages).latency_s):
        return "a link of it is closed"
    if is_draining(state, chain):
        return ""
    if state.models[chain.model].is_kept and not target.is_urgent:
        return "the layout is to be kept"
    missing = _not_loaded(state, chain, target.stages)
    return "" if _fit_alongside(state, chain, missing) else "there is no room for both while it moves"


def _conclude(state: ClusterState, chain: Chain, target: MoveTarget, now_s: float) -> Event:
    request = placement_request(state, state.models[chain.model].model, now_s, chain=chain)
    if not target.is_urgent and {offer.node for offer in request.offers} >= set(chain.members):
        gain = score(request, target.stages).score / score(request, chain.stages).score - 1
        least = _least_gain(state.placing, chain.stages, target.stages)
        wanted = least * chain.unrest.factor(state.placing, now_s) / 2
        if gain < _KEPT_GAIN * wanted:
            found = f"measured again {layout_in_words(state, target.stages)} would gain {gain:.0%} only"
            return MoveDropped(chain.id, chain.epoch, f"no move, {found}", now_s)
    return ChainReshaped(chain.id, chain.epoch + 1, target.stages, target.reason, now_s)


def which_move_pays(state: ClusterState, now_s: float) -> Event | None:
    for chain in state.live_chains():
        if chain.status != "ready" or chain.target is not None or is_waiting(state, chain.stages):
            continue
        planned = _plan_move(state, chain, now_s)
        if planned is not None:
            return planned
    return None


def _plan_move(state: ClusterState, chain: Chain, now_s: float) -> MovePlanned | None:
    """To the layout to which a serving chain should move now."""
    is_leaving = is_draining(state, chain) or has_unchecked(state, chain, now_s)
    if not is_leaving and not may_move(state, chain, now_s):
        return None
    request = placement_request(state, state.models[chain.model].model, now_s, chain=chain)
    if is_leaving:
        relief = _relief(state, chain, request)
        return None if relief is None else _planned(chain, relief, now_s)
    if not set(chain.members) <= {offer.node for offer in request.offers}:
        return None
    best = _best_known(chain, request)
    if best is None or best == chain.stages:
        return None
    cautious = _cautious(chain, request)
    now, then = score(request, chain.stages), score(cautious, best)
    least = _least_gain(state.placing, chain.stages, best) * chain.unrest.factor(state.placing, now_s)
    if not _fit_alongside(state, chain, _not_loaded(state, chain, best)):
        # What is worth less than the best by so much is not worth looking for.
        relieved = _relieved(state, chain, request) if then.score / now.score - 1 >= least else None
        if relieved is None:
            return None
        best, then = relieved, score(cautious, relieved)
    move = Replacement(best, *move_seconds(request, best), "improved")
    if request.suits(best) and not request.suits(chain.stages):
        asked = f"{asked_in_words(request.parallel)} were asked for"
        target = MoveTarget(best, move_in_words(state, chain, move, asked, now, then), is_urgent=True)
        return _planned(chain, target, now_s, now, then)
    if request.suits(chain.stages) and not request.suits(best):
        return None
    if chain.unrest.has_left(state.placing, now_s, best) and not _has_been_tried(request, chain.stages):
        return None
    gain = then.score / now.score - 1
    pays = gain * expected_life_s(state.placing, chain) > move.move_s + state.placing.pause_s
    least = _least_gain(state.placing, chain.stages, best)
    if not pays or gain < least * chain.unrest.factor(state.placing, now_s):
        return None
    target = MoveTarget(move.stages, move_in_words(state, chain, move, f"{gain:.0%} better", now, then))
    return _planned(chain, target, now_s, now, then)


def _cautious(chain: Chain, request: Request) -> Request:
    """The same terms, with machines that have not served yet as slow as those that do, as far as a single measurement
    may hide that."""
    factor = request.policy.untried_factor
    slowest = max(each.seconds_per_byte for each in request.offers if each.node in chain.members)
    offers = tuple(
        dataclasses.replace(each, seconds_per_byte=min(factor * each.seconds_per_byte, slowest))
        if not each.is_served and each.node not in chain.members and each.seconds_per_byte < slowest
        else each
        for each in request.offers
    )
    return dataclasses.replace(request, offers=offers)


def _planned(
    chain: Chain, target: MoveTarget, now_s: float, now: Score | None = None, then: Score | None = None
) -> MovePlanned:
    step = None if chain.ring is None or chain.ring.epoch != chain.epoch else chain.ring.step
    return MovePlanned(
        chain.id,
        chain.epoch,
        target.stages,
        target.reason,
        target.is_urgent,
        now_s,
        expected_before_s=0.0 if now is None else now.latency_s,
        expected_after_s=0.0 if then is None else then.latency_s,
        measured_s=0.0 if step is None else step.level,
    )


def may_move(state: ClusterState, chain: Chain, now_s: float) -> bool:
    """Whether a chain may move for gain, or because it is not as was asked: where nobody wants it to be kept, it has
    served for a while, and not all moves of this hour are made."""
    if state.models[chain.model].is_kept or not chain.unrest.has_settled(state.placing, now_s):
        return False
    return len(moves_of_the_hour(state, chain, now_s)) < state.placing.moves_per_hour


def moves_of_the_hour(state: ClusterState, chain: Chain, now_s: float) -> list[Move]:
    """Those for gain."""
    since_s = now_s - state.placing.budget_s
    return [
        each
        for each in state.moves
        if each.chain == chain.id and not each.is_urgent and each.planned_s > since_s
    ]


def expected_life_s(policy: PlacementPolicy, chain: Chain) -> float:
    """How long a layout of this chain is expected to last: as long as the last ones did where several have ended, and
    never longer than anybody can foresee."""
    if len(chain.lived) < 2:
        return policy.horizon_s
    return min(max(fmean(chain.lived), policy.least_lifetime_s), policy.horizon_s)


def which_move_is_judged(state: ClusterState, now_s: float) -> Event | None:
    """A question of `planning`: what came of moves, once steps of the new layout have been measured."""
    for move in state.moves:
        if move.outcome:
            continue
        chain = state.chains.get(move.chain)
        if chain is None or not chain.is_live:
            return MoveJudged(move.number, "not measured: the chain is no more")
        if not move.made_epoch:
            if chain.target is None:
                return MoveJudged(move.number, f"not made: {chain.reason or 'the chain changed meanwhile'}")
            continue
        if chain.epoch > move.made_epoch:
            return MoveJudged(move.number, "not measured: the chain changed again before it was used")
        step = None if chain.ring is None or chain.ring.epoch != chain.epoch else chain.ring.step
        if step is not None and step.is_settled:
            return MoveJudged(move.number, outcome_in_words(move, step.level), step.level)
    return None


def _least_gain(policy: PlacementPolicy, before: Sequence[Assignment], after: Sequence[Assignment]) -> float:
    """What a first move has to gain. Where machines begin to compute together, or end it, their own noise is on both
    sides, so that less is enough."""
    is_grouped = [any(stage.ranks for stage in stages) for stages in (before, after)]
    return policy.min_gain if is_grouped[0] == is_grouped[1] else policy.tensor_min_gain


def _has_been_tried(request: Request, stages: Sequence[Assignment]) -> bool:
    """Whether machines that compute together here have shown what they do: then those that were left for the promise
    of it may be gone back to."""
    tried = {(each.members, each.exchange) for each in request.group_times}
    return any((stage.members, stage.exchange) in tried for stage in stages if stage.ranks)


def _best_known(chain: Chain, request: Request) -> tuple[Assignment, ...] | None:
    """What is found quickly or, where it is still possible and better by what is measured now, was found by a
    search."""
    quick = place(request)
    if isinstance(quick, Unplaceable):
        return None
    if chain.found and request.suits(chain.found):
        is_better = is_possible(request, chain.found) and score(request, chain.found).score > quick.score
        return chain.found if is_better else quick.assignments
    return quick.assignments


def _relieved(state: ClusterState, chain: Chain, request: Request) -> tuple[Assignment, ...] | None:
    """The best layout that differs in one stage, which somebody who does nothing for the chain takes over as it is: for
    machines that are too full to hold what they have and what a new cut would give them."""
    idle = [each for each in request.offers if each.node not in chain.members and not each.is_standby]
    spares = sorted(idle, key=lambda each: (each.seconds_per_byte, each.node))[:_SPARES]
    layouts = [
        (*chain.stages[:index], spare.take(stage.start, stage.stop), *chain.stages[index + 1 :])
        for index, stage in enumerate(chain.stages)
        for spare in spares
        if not stage.ranks
    ]
    possible = [
        stages
        for stages in layouts
        if is_possible(request, stages) and _fit_alongside(state, chain, _not_loaded(state, chain, stages))
    ]
    return max(possible, key=lambda stages: score(request, stages).score, default=None)


def searches(state: ClusterState, now_s: float) -> Iterator[Action]:
    """Chains for which a better layout may be found by searching longer, and that may move."""
    for chain in state.live_chains():
        if chain.status != "ready" or chain.target is not None or now_s < chain.search_at_s:
            continue
        if is_draining(state, chain) or is_waiting(state, chain.stages):
            continue
        if not may_move(state, chain, now_s):
            continue
        quick = place(placement_request(state, state.models[chain.model].model, now_s, chain=chain))
        if isinstance(quick, Placement) and not quick.is_final:
            yield SearchLayout(chain.id, chain.epoch)


def _relief(state: ClusterState, chain: Chain, request: Request) -> MoveTarget | None:
    """A shape without the draining nodes. One for which the others would have to stop is put off for one for which
    they need not, unless that halves the speed."""
    standbys = loaded_standbys(state, chain)
    best = replace_stage(request, chain.stages, (), standbys)
    if isinstance(best, Unplaceable):
        return None
    if not _fit_alongside(state, chain, _not_loaded(state, chain, best.stages)):
        gentle = hand_over(request, chain.stages, standbys)
        if gentle and 2 * score(request, gentle.stages).score >= score(request, best.stages).score:
            best = gentle
    offered = {offer.node for offer in request.offers}
    leaving = [node for node in chain.members if node not in offered]
    leaving = leaving or [node for node in chain.members if state.nodes[node].is_on_probation]
    names = ", ".join(name_of(state, node) for node in leaving)
    change = change_in_words(state, chain.stages, best.stages)
    return MoveTarget(best.stages, f"{names} is to be relieved: {change}", is_urgent=True)


def is_draining(state: ClusterState, chain: Chain) -> bool:
    return any(state.nodes[node].is_draining for node in chain.members)


def has_unchecked(state: ClusterState, chain: Chain, now_s: float) -> bool:
    """Whether a machine on probation computes for it whose layers nobody could compute again any more."""
    if not any(state.nodes[node].is_on_probation for node in chain.members):
        return False
    request = placement_request(state, state.models[chain.model].model, now_s, chain=chain)
    return not is_possible(request, chain.stages)


def _not_loaded(state: ClusterState, chain: Chain, stages: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
    return tuple(stage for stage in stages if not is_loaded(state, chain, stage))


def _fit_alongside(state: ClusterState, chain: Chain, missing: tuple[Assignment, ...]) -> bool:
    """True when these shards can be loaded while the chain goes on serving as it is."""
    model = state.models[chain.model].model
    return all(
        claimed_bytes(state, node) + memory_of(state, model, stage, node) <= state.nodes[node].room_bytes
        for stage in missing
        for node in stage.members
        if not holds(state, chain, stage, node)
    )
