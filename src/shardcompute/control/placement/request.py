"""From the state to the terms of a placement: who may serve a chain, with how much memory, how fast."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from shardcompute.backends.exactness import parse_class
from shardcompute.backends.footprint import RANK_BACKENDS
from shardcompute.control.placement.capacities import MeasuredGroup, NodeCapacity, Request
from shardcompute.control.placement.parallelism import PIPELINE
from shardcompute.control.placement.strangers import offer_to_strangers
from shardcompute.control.sizes import needs_of, shape_of, sizes_of
from shardcompute.control.state import Chain, ClusterState, LayerTime, Model, Node
from shardcompute.control.transitions.state_updates import claimed_bytes

_NO_ADAPTERS = (
    "on a device or backend that computes no adapters: start it with --device cpu --backend onnx (or torch), or merge "
    "one adapter into the weights with --merge-adapter"
)
_NO_FALLBACK = (
    'without torch and transformers, which alone run this model: pip install "shardcompute[torch]" there'
)


def placement_request(
    state: ClusterState,
    model: Model,
    now_s: float,
    *,
    chain: Chain | None = None,
    has_draining: bool = False,
    has_shared: bool = False,
    has_coming: bool = False,
) -> Request:
    """The terms for a chain of `model`: an existing one, whose own memory counts as free, or a new one.

    Standbys count as free: they give way to stages. What other chains are moving to is theirs already, unless
    `has_coming`. Nodes of other chains of the same model are left out unless `has_shared`, draining ones unless
    `has_draining`.
    """
    key = (model.name, None if chain is None else chain.id, has_draining, has_shared, has_coming)
    known = state.models.get(model.name)
    if (
        known is None
        or known.model is not model
        or (chain is not None and state.chains.get(chain.id) is not chain)
    ):
        return _request_of(state, model, now_s, chain, has_draining, has_shared, has_coming)
    terms = _terms_of(state, now_s)
    if key not in terms:
        terms[key] = _request_of(state, model, now_s, chain, has_draining, has_shared, has_coming)
    return terms[key]


_TermsKey = tuple[str, str | None, bool, bool, bool]
_terms: tuple[ClusterState, float, dict[_TermsKey, Request]] | None = None
"""Of the state that was asked about last, at that time: several questions of one look need the same ones."""


def _terms_of(state: ClusterState, now_s: float) -> dict[_TermsKey, Request]:
    global _terms
    known = _terms
    if known is None or known[0] is not state or known[1] != now_s:
        known = _terms = (state, now_s, {})
    return known[2]


def _request_of(
    state: ClusterState,
    model: Model,
    now_s: float,
    chain: Chain | None,
    has_draining: bool,
    has_shared: bool,
    has_coming: bool,
) -> Request:
    own = None if chain is None else chain.id
    others = [other for other in state.live_chains(model.name) if other.id != own]
    taken = {node for other in others for node in (other.members if has_coming else _used_by(other))}
    statuses = ("ready", "draining") if has_draining else ("ready",)
    corrections = _Corrections(_service_factor(state, model), _probe_factor(state, model))
    found = [
        node
        for node in (state.nodes[id] for id in sorted(state.nodes))
        if node.can_work
        and node.status in statuses
        and not node.is_refusing(model.name, now_s)
        and (has_shared or node.id not in taken)
    ]
    coming = {} if has_coming else _coming_bytes(state, own)
    offers = tuple(
        _offer(state, node, model, own, corrections, coming.get(node.id, 0))
        for node in found
        if node.can_run(model)
    )
    why = _NO_FALLBACK if model.runner else _NO_ADAPTERS
    unfit = tuple((node.id, why) for node in found if not node.can_run(model))
    offers = _of_one_class(state, model, offers, () if chain is None else chain.members)
    offers, unchecked = offer_to_strangers(state, model, offers, () if chain is None else chain.stages)
    unfit += unchecked
    named = {offer.node for offer in offers} | {state.driver}
    links = tuple(
        link
        for a in sorted(state.links)
        for b, link in sorted(state.links[a].items())
        if a in named and b in named
    )
    driver = _driver_of(state, model, chain, [offer.node for offer in offers])
    requested = state.models.get(model.name)
    parallel = requested.parallel if requested is not None else PIPELINE
    return Request(model, offers, links, driver, state.placing, parallel, unfit, _group_times(state, model))


def _used_by(chain: Chain) -> set[str]:
    """Who computes for a chain, and who will once it has moved."""
    coming = () if chain.target is None else chain.target.stages
    return {*chain.members, *(node for stage in coming for node in stage.members)}


def _coming_bytes(state: ClusterState, own_chain: str | None) -> dict[str, int]:
    """Memory, by node, that other chains will use once they have moved."""
    taken: dict[str, int] = {}
    for other in state.live_chains():
        if other.target is None or other.id == own_chain:
            continue
        for stage in other.target.stages:
            if stage not in other.stages:
                for node, size in needs_of(state, state.models[other.model].model, stage).items():
                    taken[node] = taken.get(node, 0) + size
    return taken


def _group_times(state: ClusterState, model: Model) -> tuple[MeasuredGroup, ...]:
    """What groups took with this model, or one of its shape."""
    shape, work = shape_of(model), _layer_work(model)
    return tuple(
        MeasuredGroup(time.members, time.exchange, time.seconds / work)
        for node in (state.nodes[id] for id in sorted(state.nodes))
        for time in node.group_times
        if work > 0 and (time.model == model.name if time.shape is None else shape.is_like(time.shape))
    )


def _of_one_class(
    state: ClusterState, model: Model, offers: tuple[NodeCapacity, ...], used: Sequence[str]
) -> tuple[NodeCapacity, ...]:
    """Without CPUs that cannot compute the model by the backend that was chosen for it, as long as the others have
    the memory: whoever goes on after a failure is of the same exactness class then. `used` ones stay."""
    kept = tuple(
        offer for offer in offers if offer.node in used or state.nodes[offer.node].runs_as_chosen(model)
    )
    if len(kept) == len(offers):
        return offers
    held = [(offer, sizes_of(model).on(offer.holding)) for offer in kept]
    room_bytes = sum(max(0, offer.memory_bytes - each.overhead_bytes) for offer, each in held)
    needed_bytes = max((each.total_bytes - each.overhead_bytes for _, each in held), default=0)
    return kept if kept and room_bytes >= needed_bytes else offers


def _driver_of(state: ClusterState, model: Model, chain: Chain | None, nodes: Sequence[str]) -> str:
    """From where the hops of a chain count: from where its driver sits or, as long as it sits nowhere, would sit.

    That is the worker which is nearest to the others, where the coordinator is clearly farther from them; the exact
    host follows from the chain's shape (`driver_placement`).
    """
    requested, home = state.models.get(model.name), state.driver
    must_stay = requested is not None and requested.has_draft_model
    if state.placing.drivers == "here" or must_stay or _is_cut_off(state, home, nodes):
        return home
    if chain is not None and (chain.driver_host in nodes or chain.status == "ready"):
        return chain.driver_host or home
    home_s = _mean_rtt_s(state, home, nodes)
    means = {node: _mean_rtt_s(state, node, nodes) for node in nodes if state.nodes[node].can_host}
    known = {node: mean_s for node, mean_s in means.items() if mean_s is not None}
    if home_s is None or not known:
        return home
    nearest = min(known, key=lambda node: (known[node], node))
    wanted_s = max(state.placing.driver_min_gain_s, state.placing.driver_min_gain * home_s)
    return nearest if home_s - known[nearest] >= wanted_s else home


def _is_cut_off(state: ClusterState, home: str, nodes: Sequence[str]) -> bool:
    """Whether the coordinator cannot reach some of them: a chain must begin and end where it can."""
    links = (state.link(home, node) for node in nodes)
    return any(link is not None and not link.is_open for link in links)


def _mean_rtt_s(state: ClusterState, node: str, others: Sequence[str]) -> float | None:
    """To all others; None where one was not measured, or is out of reach."""
    links = [state.link(node, other) for other in others if other != node]
    rtts = [link.rtt_s for link in links if link is not None and link.is_open]
    return None if len(rtts) < len(links) else sum(rtts) / max(len(rtts), 1)


def _offer(
    state: ClusterState,
    node: Node,
    model: Model,
    own_chain: str | None,
    corrections: _Corrections,
    coming_bytes: int,
) -> NodeCapacity:
    free = node.room_bytes - claimed_bytes(state, node.id, except_chain=own_chain) - coming_bytes
    cached = {(each.start, each.stop) for each in node.cached if each.model == model.name}
    held = cached | {(each.start, each.stop) for each in node.shards if each.model == model.name}
    return NodeCapacity(
        node=node.id,
        memory_bytes=max(0, free),
        seconds_per_byte=_seconds_per_byte(state, node, model, corrections),
        overhead_s=node.overhead_s,
        prefill_seconds_per_byte=_prefill_seconds_per_byte(node, model),
        held=tuple(sorted(held)),
        is_standby=node.is_standby,
        holding=node.holding_of(model),
        rank_class=_rank_class(node, model),
        is_measured=layer_time(node, model) is not None or node.probed_at_s > 0,
        is_served=(time := layer_time(node, model)) is not None and time.is_served,
    )


def _rank_class(node: Node, model: Model) -> str:
    """Its exactness class, where it can be one of several that compute a stage together."""
    known = parse_class(node.exactness_of(model))
    if known is None or known.backend not in RANK_BACKENDS:
        return ""
    if model.tensor is None or model.adapters or model.sees:
        return ""
    return known.name


@dataclass(frozen=True, slots=True)
class _Corrections:
    """What is to be added to what was not measured in service: of loaded models, and of probes."""

    loaded: float
    probed: float


def _seconds_per_byte(state: ClusterState, node: Node, model: Model, corrections: _Corrections) -> float:
    """As measured on this model or one of its shape, else as probed, else as guessed; what was not measured in
    service is corrected by what others measured.

    A probe is simpler than a model, and a model that was just loaded has its machine to itself, so both promise too
    much: without the correction a machine that nobody has tried yet would always look better than those that serve.
    """
    time, work = layer_time(node, model), _layer_work(model)
    if time is not None and work > 0:
        return time.seconds / work * (1.0 if time.is_served else corrections.loaded)
    probed = node.seconds_per_byte or state.placing.default_seconds_per_byte
    return probed * corrections.probed


def speed_source(node: Node, model: Model) -> str:
    """In words, what placement knows of a node's speed with a model."""
    time = layer_time(node, model)
    if time is not None:
        of = "" if time.model == model.name else f" with {time.model}"
        return f"measured in service{of}" if time.is_served else f"measured{of}"
    return "probed" if node.probed_at_s else "guessed"


def _prefill_seconds_per_byte(node: Node, model: Model) -> float | None:
    time, work = layer_time(node, model), _layer_work(model)
    if time is not None and time.prefill_s is not None and work > 0:
        return time.prefill_s / work
    return node.prefill_seconds_per_byte


def layer_time(node: Node, model: Model) -> LayerTime | None:
    """What a node measured with this model in this form, or with another of its shape."""
    shape = shape_of(model)
    own = [time for time in node.layer_times if time.model == model.name]
    like = [
        time for time in (*own, *node.layer_times) if time.shape is not None and shape.is_like(time.shape)
    ]
    unshaped = [time for time in own if time.shape is None]
    return next(iter((*like, *unshaped)), None)


def _layer_work(model: Model) -> float:
    return sizes_of(model).work_before[-1] / model.layer_count


def _service_factor(state: ClusterState, model: Model) -> float:
    """By how much a model is slower in service than when it was loaded, on every machine that serves it. One alone that
    is slower by more than is usual may be so for reasons of its own; what several have in common will slow others
    as well, and is no reason to leave any of them for one that nobody has tried."""
    times = (layer_time(node, model) for node in state.nodes.values())
    factors = [
        time.seconds / time.loaded_s
        for time in times
        if time is not None and time.is_served and time.loaded_s > 0
    ]
    most = state.placing.usual_service_factor if len(factors) == 1 else inf
    return min(max(1.0, min(factors, default=1.0)), most)


def _probe_factor(state: ClusterState, model: Model) -> float:
    """How much slower this model is than probes say, on the machines that have run it."""
    work = _layer_work(model)
    ratios = [
        time.seconds / work / node.seconds_per_byte
        for node in state.nodes.values()
        if node.seconds_per_byte and work > 0 and (time := layer_time(node, model)) is not None
    ]
    return statistics.median(ratios) if ratios else 1.0
