"""Decisions as a chain of small questions; each answers with the next event to record, or None.

Asked again after each answer until all say None. Every answer follows from the state and the time alone.
"""

from __future__ import annotations

from shardcompute.control.events import (
    ChainBroken,
    ChainPlanned,
    ChainReshaped,
    ChainRetired,
    Event,
    NodeLost,
    StandbysChosen,
)
from shardcompute.control.health import next_health_events
from shardcompute.control.placement.cost_model import NodeCapacity, Request, score
from shardcompute.control.placement.place import Placement, Unplaceable, choose_standbys, place, place_chains
from shardcompute.control.placement.replacement import Replacement, hand_over, move_seconds, replace_stage
from shardcompute.control.placement.request import placement_request
from shardcompute.control.sizes import memory_of
from shardcompute.control.state import Assignment, Chain, ClusterState, is_loaded
from shardcompute.control.transitions.state_updates import claimed_bytes


def who_is_suspected_or_lost(state: ClusterState, now_s: float) -> Event | None:
    events = next_health_events(state, now_s)
    # Whoever is in doubt can stand in for nobody, so all doubts come before the first loss.
    for event in sorted(events, key=lambda each: isinstance(each, NodeLost)):
        if not isinstance(event, NodeLost) or not _is_worth_waiting_for(state, event.node, now_s):
            return event
    return None


def _is_worth_waiting_for(state: ClusterState, id: str, now_s: float) -> bool:
    """A machine that is only silent, and whose layers nobody could take over now: if it comes back its chains go on
    where they were, and if it does not, nothing was lost by waiting."""
    node = state.nodes[id]
    if node.accusers or node.is_draining or now_s >= node.last_seen_s + state.health.given_up_after_s:
        return False
    chains = [chain for chain in state.live_chains() if id in chain.nodes]
    return bool(chains) and all(isinstance(repair(state, chain, now_s), Unplaceable) for chain in chains)


def which_chain_is_surplus(state: ClusterState, now_s: float) -> Event | None:
    for name in sorted(state.models):
        requested, chains = state.models[name], state.live_chains(name)
        wanted = requested.chain_count if requested.is_wanted else 0
        if len(chains) > wanted:
            worst = max(chains, key=lambda chain: (chain.is_interrupted, chain.status != "ready", chain.id))
            reason = "the model is no longer wanted" if wanted == 0 else "fewer chains are wanted"
            return ChainRetired(worst.id, reason)
    return None


def which_chain_needs_repair(state: ClusterState, now_s: float) -> Event | None:
    for chain in state.live_chains():
        if not chain.is_interrupted or _is_waiting(state, chain):
            continue
        replacement = repair(state, chain, now_s)
        if isinstance(replacement, Replacement):
            return ChainReshaped(chain.id, chain.epoch + 1, replacement.stages, replacement.how)
        if chain.status != "broken" and _may_get_help(state):
            continue
        broken = ChainBroken(chain.id, chain.epoch, replacement.missing_bytes, replacement.reasons[-1])
        if (chain.status, chain.missing_bytes) != ("broken", broken.missing_bytes):
            return broken
    return None


def _is_waiting(state: ClusterState, chain: Chain) -> bool:
    """A node in doubt will be either back or lost in a moment; until then moving bytes is premature."""
    return any(state.nodes[node].status in ("suspected", "joining") for node in chain.nodes)


def _may_get_help(state: ClusterState) -> bool:
    """Some machine is in doubt and may be back in a moment: until then nothing is given up."""
    return any(node.can_work and node.status in ("suspected", "joining") for node in state.nodes.values())


def repair(state: ClusterState, chain: Chain, now_s: float) -> Replacement | Unplaceable:
    """A shape for a chain that was interrupted, with draining nodes only if it must be."""
    model = state.models[chain.model].model

    def attempt(has_draining: bool) -> Replacement | Unplaceable:
        request = placement_request(state, model, now_s, chain=chain, has_draining=has_draining)
        return replace_stage(request, chain.stages, (), _loaded_standbys(state, chain))

    without = attempt(has_draining=False)
    if isinstance(without, Replacement):
        return without
    including = attempt(has_draining=True)
    return including if isinstance(including, Replacement) else without


def _loaded_standbys(state: ClusterState, chain: Chain) -> list[Assignment]:
    return [standby for standby in chain.standbys if is_loaded(state, chain, standby)]


def which_chain_is_missing(state: ClusterState, now_s: float) -> Event | None:
    for name in sorted(state.models):
        requested = state.models[name]
        missing = requested.chain_count - len(state.live_chains(name))
        if requested.is_wanted and missing > 0:
            placement = place_next_chain(state, name, missing, now_s)
            if isinstance(placement, Placement):
                id = f"{name}#{state.chains_planned + 1}"
                return ChainPlanned(id, name, placement.assignments, placement.reasons[-1])
    return None


def place_next_chain(state: ClusterState, name: str, count: int, now_s: float) -> Placement | Unplaceable:
    """A placement for the next of `count` chains to come, on machines of its own if that can be."""
    model = state.models[name].model
    placement = place_chains(placement_request(state, model, now_s), count)[0]
    if isinstance(placement, Unplaceable):
        shared = place(placement_request(state, model, now_s, has_shared=True))
        return shared if isinstance(shared, Placement) else placement
    return placement


def which_chain_can_move(state: ClusterState, now_s: float) -> Event | None:
    """Switch a serving chain to a better shape once all shards of that are loaded, or at once to empty a node."""
    for chain in state.live_chains():
        target = better_shape(state, chain, now_s)
        if target is None:
            continue
        missing = _not_loaded(state, chain, target.stages)
        must_break = _is_draining(state, chain) and not _fit_alongside(state, chain, missing)
        if not missing or must_break:
            return ChainReshaped(chain.id, chain.epoch + 1, target.stages, target.how)
    return None


def better_shape(state: ClusterState, chain: Chain, now_s: float) -> Replacement | None:
    """The shape a serving chain should move to: off a draining node, or to one that pays for the move."""
    if chain.status != "ready" or _is_waiting(state, chain):
        return None
    request = placement_request(state, state.models[chain.model].model, now_s, chain=chain)
    if _is_draining(state, chain):
        return _relief(state, chain, request)
    if not set(chain.nodes) <= {offer.node for offer in request.offers}:
        return None
    best = place(request)
    if isinstance(best, Unplaceable):
        return None
    gain = best.score / score(request, chain.stages).score - 1
    moved, seconds = move_seconds(request, best.assignments)
    pays = gain >= state.placing.min_gain and gain * state.placing.horizon_s > seconds
    fits = _fit_alongside(state, chain, _not_loaded(state, chain, best.assignments))
    return Replacement(best.assignments, moved, seconds, "improved") if pays and fits else None


def _relief(state: ClusterState, chain: Chain, request: Request) -> Replacement | None:
    """A shape without the draining nodes. One for which the others would have to stop is put off for one for which
    they need not, unless that halves the speed."""
    standbys = _loaded_standbys(state, chain)
    best = replace_stage(request, chain.stages, (), standbys)
    if isinstance(best, Unplaceable):
        return None
    if not _fit_alongside(state, chain, _not_loaded(state, chain, best.stages)):
        gentle = hand_over(request, chain.stages, standbys)
        if gentle and 2 * score(request, gentle.stages).score >= score(request, best.stages).score:
            return gentle
    return best


def _is_draining(state: ClusterState, chain: Chain) -> bool:
    return any(state.nodes[node].is_draining for node in chain.nodes)


def _not_loaded(state: ClusterState, chain: Chain, stages: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
    return tuple(stage for stage in stages if not is_loaded(state, chain, stage))


def _fit_alongside(state: ClusterState, chain: Chain, missing: tuple[Assignment, ...]) -> bool:
    """True when these shards can be loaded while the chain goes on serving as it is."""
    model = state.models[chain.model].model
    return all(
        claimed_bytes(state, stage.node) + memory_of(model, stage) <= state.nodes[stage.node].memory_bytes
        for stage in missing
    )


def which_standbys_are_wanted(state: ClusterState, now_s: float) -> Event | None:
    wanted = _wanted_standbys(state, now_s)
    changed = [chain for chain in state.live_chains() if wanted[chain.id] != chain.standbys]
    if not changed:
        return None
    # Who lets go comes first, so that the memory is free for who takes.
    chain = min(changed, key=lambda each: (len(wanted[each.id]) - len(each.standbys), each.id))
    return StandbysChosen(chain.id, chain.epoch, wanted[chain.id])


def _wanted_standbys(state: ClusterState, now_s: float) -> dict[str, tuple[Assignment, ...]]:
    """The standbys of every chain; chains that are about to move choose before those that only play safe."""
    free = {id: node.memory_bytes - claimed_bytes(state, id) for id, node in state.nodes.items()}
    targets = {chain.id: better_shape(state, chain, now_s) for chain in state.live_chains()}
    wanted: dict[str, tuple[Assignment, ...]] = {}
    for chain in sorted(state.live_chains(), key=lambda each: (targets[each.id] is None, each.id)):
        model = state.models[chain.model].model
        target = targets[chain.id]
        if target is not None:
            standbys = tuple(stage for stage in target.stages if stage not in chain.stages)
        elif chain.status == "ready" and not _is_waiting(state, chain):
            request = placement_request(state, model, now_s, chain=chain)
            standbys = choose_standbys(request, chain.stages, _spares(request, chain, free))
        else:
            standbys = chain.standbys
        standbys = tuple(each for each in standbys if memory_of(model, each) <= free[each.node])
        for standby in standbys:
            free[standby.node] -= memory_of(model, standby)
        wanted[chain.id] = standbys
    return wanted


def _spares(request: Request, chain: Chain, free: dict[str, int]) -> list[NodeCapacity]:
    return [
        NodeCapacity(offer.node, free[offer.node], offer.seconds_per_byte, is_standby=offer.is_standby)
        for offer in request.offers
        if offer.node not in chain.nodes
    ]
