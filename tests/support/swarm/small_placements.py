"""Small requests for placements, drawn at random, and every layout that is possible for them."""

from __future__ import annotations

from itertools import combinations, permutations

import msgspec
from hypothesis import strategies as st

from shardcompute.control import Model, NodeCapacity, PlacementPolicy, Request
from shardcompute.control.placement.cost_model import hops_of
from shardcompute.control.sizes import Sizes
from shardcompute.control.state import Assignment, MeasuredLink
from shardcompute.weights.held import HeldSizes

NAMES = "abcdef"
_MORE_NAMES = "abcdefgh"


def make_model(layers: tuple[int, ...], ends: tuple[int, int] = (0, 0), **changes: object) -> Model:
    fields: dict[str, object] = {
        "name": "m",
        "layer_bytes": layers,
        "embedding_bytes": ends[0],
        "head_bytes": ends[1],
        "kv_bytes_per_token_and_layer": 1,
        "kv_tokens": 1,
        "hidden": 8,
        "context_length": 64,
        "weight_form": "int8",
    }
    return Model(**{**fields, **changes})  # type: ignore[arg-type]


def with_held(model: Model, factors: tuple[int, int], scratch: tuple[int, int]) -> Model:
    """One holder that takes files as they are, and one that takes other multiples of layers and ends."""
    held = HeldSizes(
        "wide",
        layer_bytes=tuple(factors[i % 2] * size for i, size in enumerate(model.layer_bytes)),
        embedding_bytes=factors[1] * model.embedding_bytes,
        head_bytes=factors[0] * model.head_bytes,
        kv_bytes=(("float32", 0),),
        scratch_bytes=scratch[0],
        head_scratch_bytes=scratch[1],
    )
    return msgspec.structs.replace(model, held=(held,))


models = st.builds(
    with_held,
    st.builds(
        make_model,
        st.lists(st.integers(1, 6), min_size=1, max_size=6).map(tuple),
        st.tuples(st.integers(0, 6), st.integers(0, 6)),
        is_head_tied=st.booleans(),
        shard_overhead_bytes=st.integers(0, 2),
    ),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
LOG_BYTES = 4 * 8
"""What every stage of such a model keeps for its log where it is held by somebody."""


@st.composite
def capacities(draw: st.DrawFn, name: str) -> NodeCapacity:
    """Machines of two kinds, for one of which the model is larger."""
    holding = draw(st.sampled_from(["", "", "wide"]))
    return NodeCapacity(
        name,
        draw(st.integers(0, 40)) + (LOG_BYTES if holding else 0),
        draw(st.sampled_from([0.5, 1.0, 3.0])),
        draw(st.sampled_from([0.0, 0.5])),
        tuple(draw(st.lists(st.tuples(st.integers(0, 2), st.integers(3, 6)), max_size=1))),
        draw(st.integers(0, 5)) == 0,
        holding,
    )


@st.composite
def requests(draw: st.DrawFn, most: int = 4, least: int = 1) -> Request:
    count = draw(st.integers(least, most))
    offers = tuple(draw(capacities(name)) for name in _MORE_NAMES[:count])
    ends = [*_MORE_NAMES[:count], "driver"]
    links = tuple(
        MeasuredLink(a, b, draw(st.sampled_from([0.1, 2.0, 30.0])), 1e6, draw(st.integers(0, 9)) > 0)
        for a, b in combinations(sorted(ends), 2)
        if draw(st.booleans())
    )
    policy = PlacementPolicy(
        latency_weight=draw(st.sampled_from([0.0, 0.8, 1.0])),
        machine_price=draw(st.sampled_from([0.0, 0.05])),
    )
    return Request(draw(models), offers, links, "driver", policy)


def every_cut(count: int, layers: int) -> list[tuple[int, ...]]:
    return [(0, *inner, layers) for inner in combinations(range(1, layers), count - 1)]


def fits(order: tuple[NodeCapacity, ...], sizes: Sizes, edges: tuple[int, ...]) -> bool:
    return all(
        sizes.on(offer.holding).memory_bytes(edges[i], edges[i + 1]) <= offer.memory_bytes
        for i, offer in enumerate(order)
    )


def every_shape(request: Request) -> list[tuple[Assignment, ...]]:
    """Brute force: all subsets, orders and cuts that fit and whose links are open."""
    layers = request.sizes.layer_count
    return [
        tuple(Assignment(offer.node, edges[i], edges[i + 1]) for i, offer in enumerate(order))
        for count in range(1, min(layers, len(request.offers)) + 1)
        for order in permutations(request.offers, count)
        if hops_of(request).ring_s([offer.node for offer in order]) < float("inf")
        for edges in every_cut(count, layers)
        if fits(order, request.sizes, edges)
    ]
