"""Copies of a model with demand: one more while more ask than those there are serve well, one less when fewer do. Pure.

A copy costs machines, and an unload and a load where it comes and goes: it is added after the crowd has lasted, dropped
after it has been away for much longer, one at a time, and never beyond what a person allowed. One that is dropped first
takes nobody new; it ends when its last answer has.
"""

from __future__ import annotations

from msgspec import Struct

from shardcompute.control import events as happened
from shardcompute.control.placement.place import Placement, place
from shardcompute.control.placement.request import placement_request
from shardcompute.control.state import Chain, ClusterState, Demand, RequestedModel

_STALE_S = 10.0
"""What was seen so long ago says nothing of now."""
_EMPTY_S = 2.0
"""A copy that takes nobody new has to be without answers for so long: whoever chose it just before is counted then."""
_UNPLACED_S = 60.0
"""So long a copy that was added may be without machines, before it is given up."""


class CopyLimits(Struct, frozen=True):
    least: int
    most: int


def limits_of(state: ClusterState, requested: RequestedModel) -> CopyLimits:
    return CopyLimits(requested.chain_count, max(requested.chain_count, state.placing.most_chains))


def which_copies_are_wanted(state: ClusterState, now_s: float) -> happened.CopiesWanted | None:
    """A question of `planning`."""
    for name in sorted(state.models):
        requested = state.models[name]
        if requested.is_wanted and (state.placing.most_chains > 1 or requested.extra_chains):
            wanted = _next_change(state, requested, now_s)
            if wanted is not None:
                return wanted
    return None


def _next_change(
    state: ClusterState, requested: RequestedModel, now_s: float
) -> happened.CopiesWanted | None:
    limits, chains = limits_of(state, requested), state.live_chains(requested.model.name)
    extra, waited_s = requested.extra_chains, now_s - requested.copies_s
    if limits.least + extra > limits.most:
        return _want(requested, limits.most - limits.least, "", "fewer copies are allowed", now_s)
    if extra and len(chains) < limits.least + extra and waited_s >= _UNPLACED_S:
        left = max(0, len(chains) - limits.least)
        return _want(requested, left, "", "there are no machines for one more copy", now_s)
    demand = state.demand.get(requested.model.name)
    if demand is None or now_s - demand.seen_s > _STALE_S:
        return None
    leaving = next((chain for chain in chains if chain.id == requested.leaving_chain), None)
    if leaving is not None:
        return _end_of(state, requested, leaving, demand, now_s)
    if any(chain.status != "ready" for chain in chains):
        return None  # what is coming or being repaired changes what is missing
    return _more(state, requested, demand, now_s) or _less(state, requested, demand, now_s)


def _end_of(
    state: ClusterState, requested: RequestedModel, leaving: Chain, demand: Demand, now_s: float
) -> happened.CopiesWanted | None:
    """A copy that takes nobody new: needed after all, or empty."""
    policy = state.placing
    if demand.is_crowded_for(policy.crowded_s, now_s):
        told = f"{_asking(demand)}: {leaving.id} is needed after all"
        return _want(requested, requested.extra_chains, "", told, now_s)
    is_empty = not demand.sessions.get(leaving.id, 0) and demand.seen_s - requested.copies_s >= _EMPTY_S
    if not is_empty or _others_use(state, leaving):
        return None
    told = f"{leaving.id} has given its last answer and is dropped"
    return _want(requested, max(0, requested.extra_chains - 1), leaving.id, told, now_s)


def _more(
    state: ClusterState, requested: RequestedModel, demand: Demand, now_s: float
) -> happened.CopiesWanted | None:
    policy, copies = state.placing, requested.chain_count + requested.extra_chains
    if copies >= limits_of(state, requested).most or not demand.is_crowded_for(policy.crowded_s, now_s):
        return None
    if now_s - requested.copies_s < policy.crowded_s and requested.copies_s:
        return None
    if not isinstance(place(placement_request(state, requested.model, now_s)), Placement):
        return None  # machines that serve already would only be shared
    told = (
        f"{_asking(demand)}, more than {policy.sessions_per_chain} for each copy: one more, which makes "
        f"{copies + 1} of at most {limits_of(state, requested).most}"
    )
    return _want(requested, requested.extra_chains + 1, "", told, now_s)


def _less(
    state: ClusterState, requested: RequestedModel, demand: Demand, now_s: float
) -> happened.CopiesWanted | None:
    policy, chains = state.placing, state.live_chains(requested.model.name)
    if not requested.extra_chains or len(chains) <= requested.chain_count:
        return None
    if not demand.is_calm_for(policy.calm_s, now_s) or now_s - requested.copies_s < policy.calm_s:
        return None
    spare = [chain for chain in chains if not _others_use(state, chain)]
    if not spare:
        return None
    # The emptiest; of equals the newest, so that the first ones keep what they remember.
    leaving = min(reversed(spare), key=lambda chain: demand.sessions.get(chain.id, 0))
    told = f"{_asking(demand)}, which {len(chains) - 1} of {len(chains)} copies serve: {leaving.id} takes nobody new"
    return _want(requested, requested.extra_chains, leaving.id, told, now_s)


def _others_use(state: ClusterState, chain: Chain) -> bool:
    """Drivers on other machines, whose answers nobody counts here."""
    return any(each.driver not in (state.driver, chain.driver_host) for each in chain.drivers)


def _asking(demand: Demand) -> str:
    return f"{demand.total} answers run or wait"


def _want(
    requested: RequestedModel, extra: int, leaving: str, reason: str, now_s: float
) -> happened.CopiesWanted:
    return happened.CopiesWanted(requested.model.name, extra, leaving, reason, now_s)
