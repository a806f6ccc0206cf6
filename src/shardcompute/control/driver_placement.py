"""Where a chain's driver sits: with the coordinator, or on a worker from which the ring is clearly shorter.

Follows from measured links alone. Whoever sits somewhere stays there until another place is clearly better, so that
two measurements of the same line never move a driver back and forth; an unmeasured link moves nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf

from shardcompute.control.events import DriverPlaced, Event
from shardcompute.control.placement.capacities import Request
from shardcompute.control.placement.cost_model import hops_of, stage_s
from shardcompute.control.placement.place import Placement
from shardcompute.control.placement.rank_groups import offers_of
from shardcompute.control.placement.request import placement_request
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.state import Chain, ClusterState, RequestedModel
from shardcompute.core.units import format_seconds

HOME = ""
_LEAVING = 0.5
"""A driver goes home once its host gains less than this part of what made it move there."""


@dataclass(frozen=True, slots=True)
class DriverPlacement:
    """Where a driver belongs, and why. Times are on the wire; None where a link of the ring was not measured."""

    node: str
    ring_s: float | None
    home_s: float | None
    reason: str

    def told(self, names: Mapping[str, str]) -> str:
        """For people, who call the nodes by these names."""
        who = "the coordinator" if self.node == HOME else names.get(self.node, self.node)
        return f"driver on {who}: {self.reason}"


def ring_s(state: ClusterState, nodes: Sequence[str], driver: str) -> float | None:
    """How long a row is on the wire from a driver through these nodes and back; infinity where a link is closed, None
    where one was never measured."""
    total_s = 0.0
    for a, b in pairwise((driver, *nodes, driver)):
        link = state.link(a, b)
        if a == b:
            continue
        if link is None:
            return None
        total_s += link.rtt_s / 2 if link.is_open else inf
    return total_s


def where_a_driver_belongs(state: ClusterState, now_s: float) -> Event | None:
    """A question of `planning`: of chains that serve, whose driver should move."""
    for chain in state.live_chains():
        if chain.status == "ready" and not chain.is_interrupted:
            placed = driver_placement_of(state, chain, now_s)
            if placed.node != chain.driver_host:
                return DriverPlaced(chain.id, placed.node, placed.reason, now_s)
    return None


def driver_placement_of(state: ClusterState, chain: Chain, now_s: float) -> DriverPlacement:
    """Where a chain's driver belongs, given where it sits and how often it has moved."""
    unrest, policy = chain.driver_unrest, state.placing
    # The first time no layout has been given up for another yet.
    is_free = unrest.moves == 0 or unrest.has_settled(policy, now_s)
    choose = partial(
        choose_driver_placement,
        state,
        chain.nodes,
        state.models[chain.model],
        current=chain.driver_host,
        avoided=chain.avoided,
        reluctance=unrest.factor(policy, now_s) if is_free else inf,
    )
    # The longer a token is computed the more a place has to gain: one that does not pay without that never does.
    stays = choose() if chain.driver_host == HOME else None
    if stays is not None and stays.node == HOME:
        return stays
    return choose(compute_s=_compute_s(state, chain, now_s))


def choose_driver_placement(
    state: ClusterState,
    nodes: Sequence[str],
    requested: RequestedModel | None,
    *,
    compute_s: float = 0.0,
    current: str = HOME,
    avoided: Collection[str] = (),
    reluctance: float = 1.0,
) -> DriverPlacement:
    """Where the driver of a chain along these nodes belongs; a token takes `compute_s` besides the wire. A place has to
    be better by `reluctance` times as much as a first one would."""
    home_s = ring_s(state, nodes, state.driver)
    if state.placing.drivers == "here":
        return DriverPlacement(HOME, home_s, home_s, "it was told to stay there")
    if requested is not None and requested.has_draft_model:
        return DriverPlacement(HOME, home_s, home_s, "the draft model is there")
    if not _is_tenable(state, current, avoided):
        current, reluctance = HOME, 1.0
    here_s = home_s if current == HOME else ring_s(state, nodes, current)
    if home_s is None or here_s is None:
        return DriverPlacement(current, here_s, home_s, "not all links of the ring are measured")
    # The more often it has moved, the worse its place has to be: less than 1/2, 0, -1, -3 times what made it move.
    leaving = 1 - _LEAVING * reluctance / 2
    if current != HOME and not _pays(state.placing, here_s, home_s, compute_s, leaving):
        current, here_s = HOME, home_s
    rings = _rings(state, nodes, avoided)
    best = min(rings, key=lambda node: (rings[node], _from_home_s(state, node), node), default=HOME)
    if best not in (HOME, current) and _pays(state.placing, rings[best], here_s, compute_s, reluctance):
        current, here_s = best, rings[best]
    if current == HOME:
        return DriverPlacement(
            HOME, home_s, home_s, f"ring {format_seconds(home_s)}, nowhere else clearly shorter"
        )
    reason = f"ring {format_seconds(here_s)} instead of {format_seconds(home_s)}"
    return DriverPlacement(current, here_s, home_s, reason)


def current_host(chain: Chain) -> str:
    """The worker that drives a chain now: one that it was told to, and has been connected."""
    is_there = any(each.driver == chain.driver_host and each.epoch == chain.epoch for each in chain.drivers)
    return chain.driver_host if is_there else HOME


def with_driver_on(plan: Placement, request: Request, driver: str) -> Placement:
    """What a plan is predicted to do with its driver there."""
    hops_s = hops_of(replace(request, driver=driver)).ring_s([stage.node for stage in plan.stages])
    latency_s = max(sum(stage.step_s for stage in plan.stages) + hops_s, 1e-9)
    return replace(plan, predicted_tokens_per_s_one_stream=1 / latency_s, hops_s=hops_s)


def _is_tenable(state: ClusterState, node: str, avoided: Collection[str]) -> bool:
    """Whether a driver can go on where it sits. A node in doubt will be either back or lost in a moment."""
    if node == HOME:
        return True
    known = state.nodes.get(node)
    if known is None or not known.can_host or node in avoided:
        return False
    is_welcome = known.is_live and not known.is_draining and not known.quarantine
    return is_welcome and _from_home_s(state, node) < inf


def _rings(state: ClusterState, nodes: Sequence[str], avoided: Collection[str]) -> dict[str, float]:
    """By each worker that could host the driver now, how long the ring would be."""
    rings: dict[str, float] = {}
    for id in sorted(state.nodes):
        node = state.nodes[id]
        is_free = node.can_host and node.status == "ready" and id not in avoided
        seconds = ring_s(state, nodes, id) if is_free else None
        if seconds is not None and seconds < inf and _from_home_s(state, id) < inf:
            rings[id] = seconds
    return rings


def _from_home_s(state: ClusterState, node: str) -> float:
    """From the coordinator, which hands requests over and gets tokens back; infinity where that is not known."""
    link = state.link(state.driver, node)
    return link.rtt_s if link is not None and link.is_open else inf


def _pays(policy: PlacementPolicy, then_s: float, now_s: float, compute_s: float, part: float = 1.0) -> bool:
    gain_s = now_s - then_s
    wanted_s = max(policy.driver_min_gain_s, policy.driver_min_gain * (now_s + compute_s))
    return gain_s >= part * wanted_s


def _compute_s(state: ClusterState, chain: Chain, now_s: float) -> float:
    """Of one token, on all stages; 0 where a machine is not to be judged just now."""
    model = state.models[chain.model].model
    request = placement_request(state, model, now_s, chain=chain, has_draining=True, has_shared=True)
    offers = [offers_of(request).find(stage) for stage in chain.stages]
    return sum(
        stage_s(request.sizes, offer, each.start, each.stop)
        for offer, each in zip(offers, chain.stages, strict=True)
        if offer is not None and None not in offers
    )
