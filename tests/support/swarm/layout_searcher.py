"""What a coordinator's search in the background answers, at once."""

from __future__ import annotations

from shardcompute.control import ClusterState, Placement
from shardcompute.control.actions import SearchLayout
from shardcompute.control.events import LayoutFound
from shardcompute.control.placement.place import place_thoroughly
from shardcompute.control.placement.request import placement_request


def search_layout(state: ClusterState, action: SearchLayout, now_s: float) -> LayoutFound:
    chain = state.chains[action.chain]
    request = placement_request(state, state.models[chain.model].model, now_s, chain=chain)
    found = place_thoroughly(request)
    stages = found.assignments if isinstance(found, Placement) else ()
    return LayoutFound(action.chain, action.epoch, stages, now_s)
