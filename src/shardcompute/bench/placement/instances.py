"""Clusters to place a model on, drawn from a seed: sites of unlike machines, near inside and far between.

A 70B-shaped model of 80 layers. Machines are of three kinds (a laptop reads 12 GB/s of weights, a desktop 40, a GPU
300); sites lie on a map 80 ms wide, lines between them carry 20 to 500 Mbit/s.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from math import hypot

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.policy import PlacementPolicy
from shardcompute.control.state import MeasuredLink, Model

_MIB = 1 << 20
_LAYERS = 80
_LAYER_BYTES = 430 * _MIB
_END_BYTES = 520 * _MIB
_KV_TOKENS = 16_384
_KV_BYTES = 4096
_FULL_RING = 48
"""Machines of the mean size would hold `room` times the model if they were so many, however many there are."""
ROOMS = {"roomy": 4.0, "tight": 1.6}
_KINDS = ((8e-11, 0.7), (2.5e-11, 1.0), (3.3e-12, 1.3))
"""Seconds a byte, and memory beside the mean."""


def make_instance(machines: int, room: str, seed: int, policy: PlacementPolicy | None = None) -> Request:
    """The same for the same arguments."""
    chance = random.Random(f"{machines} {room} {seed}")
    sites = [(chance.uniform(0, 0.08), chance.uniform(0, 0.04)) for _ in range(max(2, machines // 8))]
    uplinks = [chance.choice([2.5e6, 1.2e7, 6e7]) for _ in sites]
    homes = [chance.randrange(len(sites)) for _ in range(machines)]
    need_bytes = _LAYERS * (_LAYER_BYTES + _KV_TOKENS * _KV_BYTES) + 2 * _END_BYTES
    mean_bytes = need_bytes * ROOMS[room] / min(machines, _FULL_RING)
    offers = tuple(_machine(number, mean_bytes, chance) for number in range(machines))
    where = {offer.node: homes[i] for i, offer in enumerate(offers)} | {"driver": 0}

    def line(a: str, b: str) -> tuple[float, float]:
        one, other = where[a], where[b]
        if one == other:
            return chance.uniform(0.0002, 0.001), chance.choice([1.2e8, 1.2e9])
        apart_s = hypot(sites[one][0] - sites[other][0], sites[one][1] - sites[other][1])
        return 0.004 + apart_s * chance.uniform(1.0, 1.2), min(uplinks[one], uplinks[other])

    links = tuple(MeasuredLink(a, b, *line(a, b)) for a, b in combinations(sorted(where), 2))
    return Request(_model(), offers, links, "driver", policy or PlacementPolicy())


def drift(request: Request, spread: float, seed: int) -> Request:
    """The same machines later: every link's time has changed by chance."""
    chance = random.Random(f"{spread} {seed}")
    later = tuple(
        MeasuredLink(link.a, link.b, link.rtt_s * chance.lognormvariate(0.0, spread), link.bytes_per_s)
        for link in request.links
    )
    return replace(request, links=later)


def _machine(number: int, mean_bytes: float, chance: random.Random) -> NodeCapacity:
    seconds, size = chance.choices(_KINDS, weights=(5, 4, 1))[0]
    return NodeCapacity(
        f"n{number:04}",
        int(mean_bytes * size * chance.uniform(0.7, 1.3)),
        seconds * chance.uniform(0.8, 1.25),
        overhead_s=0.0003,
    )


def _model() -> Model:
    return Model(
        name="70b",
        layer_bytes=(_LAYER_BYTES,) * _LAYERS,
        embedding_bytes=_END_BYTES,
        head_bytes=_END_BYTES,
        kv_bytes_per_token_and_layer=_KV_BYTES,
        kv_tokens=_KV_TOKENS,
        hidden=8192,
        context_length=8192,
        weight_form="int4",
    )
