"""The search space of a request: its machines, links and layers as the solver's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.link_tables import link_table
from shardcompute.control.sizes import Sizes
from shardcompute.control.solver.space import Floats, Ints, Objective, SearchSpace


@lru_cache(maxsize=16)
def space_of(request: Request) -> SearchSpace:
    """Machines in the order in which they are offered."""
    offers, sizes = request.offers, request.sizes
    hops, transfers = _matrices(request)
    reach, first_reach, last_from, fits_whole = _reaches(offers, sizes)
    return SearchSpace(
        seconds_per_byte=np.array([offer.seconds_per_byte for offer in offers], np.float64),
        overhead_s=np.array([offer.overhead_s for offer in offers], np.float64),
        machines=np.array([offer.machines for offer in offers], np.int64),
        work_before=np.array(sizes.work_before, np.float64),
        head_work=float(sizes.head_bytes),
        is_uniform=sizes.is_uniform,
        reach=reach,
        first_reach=first_reach,
        last_from=last_from,
        fits_whole=fits_whole,
        hops=hops,
        transfers=transfers,
        objective=Objective(request.policy.latency_weight, request.policy.machine_price),
    )


def _reaches(offers: Sequence[NodeCapacity], sizes: Sizes) -> tuple[Ints, Ints, Ints, npt.NDArray[np.bool_]]:
    """How far each machine's memory goes: see `SearchSpace`."""
    layers = sizes.layer_count
    reach = np.zeros((len(offers), layers + 1), np.int64)
    first_reach, last_from = np.zeros(len(offers), np.int64), np.zeros(len(offers), np.int64)
    fits_whole = np.zeros(len(offers), np.bool_)
    for holding in {offer.holding for offer in offers}:
        held = sizes.on(holding)
        chosen = [i for i, offer in enumerate(offers) if offer.holding == holding]
        memory = np.array([offers[i].memory_bytes for i in chosen], np.int64)
        before, room = np.array(held.memory_before, np.int64), memory - held.overhead_bytes
        stops = np.searchsorted(before, before[None, :] + room[:, None], "right") - 1
        reach[chosen] = np.maximum(stops, np.arange(layers + 1))
        first = np.searchsorted(before, room - held.embedding_bytes, "right") - 1
        first_reach[chosen] = np.clip(first, 0, layers - 1)
        last = np.searchsorted(before, before[-1] + held.head_bytes - room, "left")
        last_from[chosen] = np.clip(last, min(1, layers), layers)
        fits_whole[chosen] = memory >= held.total_bytes
    return reach, first_reach, last_from, fits_whole


def _matrices(request: Request) -> tuple[Floats, Floats]:
    """Hops between all machines and, last, the driver; and how long a row keeps each link busy."""
    lines = link_table(request.links).matrices(request.policy)
    nodes = [*(offer.node for offer in request.offers), request.driver]
    at = np.array([lines.index.get(node, -1) for node in nodes], np.int64)
    frame_bytes = request.model.hidden * request.policy.activation_bytes
    half_s = lines.rtt_s[np.ix_(at, at)] / 2
    transfers = frame_bytes / lines.bytes_per_s[np.ix_(at, at)]
    same = np.equal.outer(np.array(nodes), np.array(nodes))
    half_s[same], transfers[same] = 0.0, 0.0
    hops = half_s + transfers
    # The way back has only tokens, which weigh nothing.
    hops[:-1, -1] = half_s[:-1, -1]
    return hops, transfers
