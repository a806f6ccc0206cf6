"""Demand: how many answers each copy of a model has, for the coordinator to judge; and copies that take nobody new."""

from __future__ import annotations

from shardcompute.control.events import DemandSeen
from shardcompute.node.coordinator.coordinator import Coordinator
from shardcompute.node.driver.pool import DriverPool


def see_demand(coordinator: Coordinator, pool: DriverPool) -> None:
    """In the coordinator's thread, every second or so."""
    models = {name: each for name, each in coordinator.state.models.items() if each.is_wanted}
    pool.spare({each.leaving_chain for each in models.values() if each.leaving_chain})
    for name in models:
        coordinator.apply(DemandSeen(name, pool.sessions_of(name), coordinator.now_s()))
