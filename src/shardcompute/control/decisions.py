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
from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.place import Placement, Unplaceable, choose_standbys, place, place_chains
from shardcompute.control.placement.replacement import Replacement, keep_layout, replace_stage
from shardcompute.control.placement.request import placement_request
from shardcompute.control.sizes import needs_of
from shardcompute.control.state import Assignment, Chain, ClusterState, is_waiting, loaded_standbys
from shardcompute.control.transitions.state_updates import claimed_bytes
from shardcompute.control.wording import failures_in_words, repair_in_words, standbys_in_words

_LOOK_AHEAD = 4
"""A chain leaves enough machines for so many to come; each of them is placed to see that, for every one of them."""


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
    chains = [chain for chain in state.live_chains() if id in chain.members]
    return bool(chains) and all(isinstance(repair(state, chain, now_s), Unplaceable) for chain in chains)


def which_chain_is_surplus(state: ClusterState, now_s: float) -> Event | None:
    for name in sorted(state.models):
        requested, chains = state.models[name], state.live_chains(name)
        wanted, leaving = requested.wanted_chains, requested.leaving_chain
        if len(chains) > wanted:
            worst = max(
                chains,
                key=lambda chain: (
                    chain.id == leaving,
                    chain.is_interrupted,
                    chain.status != "ready",
                    chain.id,
                ),
            )
            reason = "the model is no longer wanted" if wanted == 0 else "fewer chains are wanted"
            return ChainRetired(worst.id, reason)
    return None


def which_chain_needs_repair(state: ClusterState, now_s: float) -> Event | None:
    for chain in state.live_chains():
        if not chain.is_interrupted or is_waiting(state, chain.stages):
            continue
        replacement = repair(state, chain, now_s)
        if isinstance(replacement, Replacement):
            told = repair_in_words(state, chain, replacement)
            return ChainReshaped(chain.id, chain.epoch + 1, replacement.stages, told, now_s)
        if chain.status != "broken" and _may_get_help(state):
            continue
        why = (replacement.reasons[-1], failures_in_words(state, chain.model, now_s))
        reason = "; ".join(each for each in why if each)
        broken = ChainBroken(chain.id, chain.epoch, replacement.missing_bytes, reason)
        if (chain.status, chain.missing_bytes) != ("broken", broken.missing_bytes):
            return broken
    return None


def _may_get_help(state: ClusterState) -> bool:
    """Some machine is in doubt and may be back in a moment: until then nothing is given up."""
    return any(node.can_work and node.status in ("suspected", "joining") for node in state.nodes.values())


def repair(state: ClusterState, chain: Chain, now_s: float) -> Replacement | Unplaceable:
    """A shape for a chain that was interrupted, with what others are moving to, or with draining nodes, only if it must
    be."""
    model = state.models[chain.model].model

    def attempt(*, has_draining: bool, has_coming: bool) -> Replacement | Unplaceable:
        request = placement_request(
            state, model, now_s, chain=chain, has_draining=has_draining, has_coming=has_coming
        )
        return replace_stage(request, chain.stages, (), loaded_standbys(state, chain))

    is_moving = any(other.target is not None for other in state.live_chains() if other.id != chain.id)
    without: Replacement | Unplaceable = Unplaceable(0, ())
    for has_draining, has_coming in ((False, False), *([(False, True)] if is_moving else []), (True, True)):
        found = attempt(has_draining=has_draining, has_coming=has_coming)
        if isinstance(found, Replacement):
            return found
        if not has_draining:
            without = found
    return without


def which_chain_is_missing(state: ClusterState, now_s: float) -> Event | None:
    for name in sorted(state.models):
        requested = state.models[name]
        live = len(state.live_chains(name))
        if requested.wanted_chains > live:
            missing = requested.chain_count - live
            # One more for many who ask is worth something on machines of its own only.
            placement = (
                place_next_chain(state, name, missing, now_s)
                if missing > 0
                else place(placement_request(state, requested.model, now_s))
            )
            if isinstance(placement, Placement):
                id = f"{name}#{state.chains_planned + 1}"
                # With other adapters, or another number of KV tokens, the weights are where they were.
                former = [each.stages for each in state.chains.values() if each.model == name]
                request = placement_request(state, requested.model, now_s)
                stages = keep_layout(request, placement.assignments, former)
                return ChainPlanned(id, name, stages, placement.reasons[-1], now_s)
    return None


def place_next_chain(state: ClusterState, name: str, count: int, now_s: float) -> Placement | Unplaceable:
    """A placement for the next of `count` chains to come, on machines of its own if that can be."""
    model = state.models[name].model
    placement = place_chains(placement_request(state, model, now_s), min(count, _LOOK_AHEAD))[0]
    if isinstance(placement, Unplaceable):
        shared = place(placement_request(state, model, now_s, has_shared=True))
        return shared if isinstance(shared, Placement) else placement
    return placement


def which_standbys_are_wanted(state: ClusterState, now_s: float) -> Event | None:
    wanted = _wanted_standbys(state, now_s)
    changed = [chain for chain in state.live_chains() if wanted[chain.id] != chain.standbys]
    if not changed:
        return None
    # Who lets go comes first, so that the memory is free for who takes.
    chain = min(changed, key=lambda each: (len(wanted[each.id]) - len(each.standbys), each.id))
    standbys = wanted[chain.id]
    return StandbysChosen(chain.id, chain.epoch, standbys, standbys_in_words(state, chain, standbys))


def _wanted_standbys(state: ClusterState, now_s: float) -> dict[str, tuple[Assignment, ...]]:
    """The standbys of every chain; chains that are moving choose before those that only play safe."""
    free = {id: node.room_bytes - claimed_bytes(state, id) for id, node in state.nodes.items()}
    wanted: dict[str, tuple[Assignment, ...]] = {}
    for chain in sorted(state.live_chains(), key=lambda each: (each.target is None, each.id)):
        model = state.models[chain.model].model
        if chain.target is not None:
            standbys = tuple(stage for stage in chain.target.stages if stage not in chain.stages)
        elif chain.status == "ready" and not is_waiting(state, chain.stages):
            request = placement_request(state, model, now_s, chain=chain)
            spares = _spares(request, chain, free)
            standbys = choose_standbys(request, chain.stages, spares, chain.standbys)
        else:
            standbys = chain.standbys
        needs = {each: needs_of(state, model, each) for each in standbys}
        standbys = tuple(
            each for each in standbys if all(size <= free[node] for node, size in needs[each].items())
        )
        for standby in standbys:
            for node, size in needs[standby].items():
                free[node] -= size
        wanted[chain.id] = standbys
    return wanted


def _spares(request: Request, chain: Chain, free: dict[str, int]) -> list[NodeCapacity]:
    return [
        NodeCapacity(
            offer.node,
            free[offer.node] - offer.kept_bytes,
            offer.seconds_per_byte,
            is_standby=offer.is_standby,
            holding=offer.holding,
        )
        for offer in request.offers
        if offer.node not in chain.members
    ]
