"""Plans in words: filter, then score, who gets which layers, what to expect and what holds it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardcompute.backends.exactness import describe_exactness, parse_class, with_kv
from shardcompute.control.decisions import place_next_chain
from shardcompute.control.placement.gaps import PlanGap
from shardcompute.control.placement.place import PlacedStage, Placement, Unplaceable, asked_in_words
from shardcompute.control.placement.rank_groups import rank_shortage
from shardcompute.control.placement.request import placement_request
from shardcompute.control.state import Assignment, Chain, ClusterState, Model, Node
from shardcompute.core.units import count_of, format_bytes, format_rate, format_seconds

ModelStatus = Literal["serving", "loading", "moving", "recovering", "unservable"]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """How a wanted model stands."""

    model: str
    status: ModelStatus
    ready_chains: int
    wanted_chains: int
    missing_bytes: int
    """0 unless a chain of it cannot be served."""
    reasons: tuple[str, ...]


def report_models(state: ClusterState, now_s: float) -> tuple[ModelReport, ...]:
    return tuple(_report(state, name, now_s) for name in sorted(state.models) if state.models[name].is_wanted)


def _report(state: ClusterState, name: str, now_s: float) -> ModelReport:
    chains, wanted = state.live_chains(name), state.models[name].chain_count
    ready = sum(chain.status == "ready" for chain in chains)
    missing_bytes = max((chain.missing_bytes for chain in chains), default=0)
    reasons = tuple(chain.reason for chain in chains if chain.status in ("broken", "recovering", "moving"))
    reasons += tuple(_not_as_asked(state, chain, now_s) for chain in chains if _lacks_ranks(state, chain))
    if len(chains) < wanted:
        placement = place_next_chain(state, name, wanted - len(chains), now_s)
        if isinstance(placement, Unplaceable):
            missing_bytes = max(missing_bytes, placement.missing_bytes)
            reasons += placement.reasons
    status: ModelStatus = "loading"
    if ready:
        status = "serving"
    elif missing_bytes:
        status = "unservable"
    elif any(chain.status == "recovering" for chain in chains):
        status = "recovering"
    elif any(chain.status == "moving" for chain in chains):
        status = "moving"
    return ModelReport(name, status, ready, wanted, missing_bytes, reasons)


def _lacks_ranks(state: ClusterState, chain: Chain) -> bool:
    asked = state.models[chain.model].parallel.tp
    return asked > 1 and any(len(stage.members) != asked for stage in chain.stages)


def _not_as_asked(state: ClusterState, chain: Chain, now_s: float) -> str:
    """Why machines compute alone although a person wants them to compute together."""
    request = placement_request(state, state.models[chain.model].model, now_s, chain=chain)
    why = (
        rank_shortage(request, request.offers) or "the machines cannot hold it so, or it is about to be moved"
    )
    return f"{asked_in_words(request.parallel)} were asked for and cannot be had yet: {why}"


def explain_plan(
    plan: Placement | Unplaceable,
    model: Model,
    names: Mapping[str, str] | None = None,
    devices: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
    first_token_s: float | None = None,
    gap: PlanGap | None = None,
) -> str:
    """A plan as text; `names` says what people call the nodes, `devices` on what those compute that are no CPUs,
    `sources` how their speed is known, `gap` how far it may be from the best."""
    if isinstance(plan, Unplaceable):
        return _explain_unplaceable(plan, model)
    called, on = names or {}, devices or {}
    through = f", through {model.runner}" if model.runner else ""
    lines = [
        *plan.reasons,
        f"plan for {model.name} ({model.weight_form}, {model.layer_count} layers{through}):",
    ]
    lines += [
        f"  {_who(stage, called, on)}: layers {stage.start} to {stage.stop - 1} "
        f"({stage.stop - stage.start}), {_together(stage)}{format_bytes(stage.memory_bytes)}, "
        f"{format_seconds(stage.step_s)} a token{_on((sources or {}).get(stage.node))}"
        for stage in plan.stages
    ]
    if model.backend_reason:
        lines.append(f"  computed by {model.backend} on CPUs: {model.backend_reason}")
    lines += [f"  {called.get(node, node)}: left out, {why}" for node, why in plan.unused]
    lines += [
        f"  {called.get(each.node, each.node)}: stands by for layers {each.start} to {each.stop - 1}"
        for each in plan.standbys
    ]
    lines.append(
        f"expect {format_rate(plan.predicted_tokens_per_s_one_stream)} for one stream, "
        f"{format_rate(plan.predicted_tokens_per_s_many)} for many"
    )
    if gap is not None:
        lines.append(gap.told())
    if first_token_s is not None:
        lines.append(
            f"after a prompt of 1,000 tokens the first token comes in {format_seconds(first_token_s)}"
        )
    lines.append(explain_bottleneck(plan, called))
    return "\n".join(lines)


def _who(stage: PlacedStage, names: Mapping[str, str], devices: Mapping[str, str]) -> str:
    members = stage.assignment.members
    return " + ".join(f"{names.get(node, node)}{_on(devices.get(node))}" for node in members)


def _together(stage: PlacedStage) -> str:
    """How several share the work of a stage."""
    if not stage.ranks:
        return ""
    weights = ":".join(str(seat.weight) for seat in stage.ranks)
    return f"each computed by all {len(stage.ranks)} ({weights}, {stage.exchange}), "


def _on(device: str | None) -> str:
    return f" ({device})" if device else ""


def device_words(node: Node) -> str:
    """On what a node computes: `NVIDIA H200, 139.8 GiB`; "" for CPUs."""
    if node.device == "cpu":
        return ""
    memory = f", {format_bytes(node.device_bytes)}" if node.device_bytes else ""
    return f"{node.device_label or node.device}{memory}"


def _explain_unplaceable(plan: Unplaceable, model: Model) -> str:
    lines = [*plan.reasons, f"{model.name} cannot be served: {format_bytes(plan.missing_bytes)} are missing"]
    lines.append("join a machine that offers this much, choose a smaller weight form, or less KV memory")
    return "\n".join(lines)


def classes_of(state: ClusterState, nodes: Sequence[str], model: Model) -> list[str]:
    """The exactness class of each of these nodes with a model; "" of one that does not say or is not there."""
    found = (state.nodes.get(node) for node in nodes)
    return ["" if node is None else node.exactness_of(model) for node in found]


def explain_exactness(state: ClusterState, stages: Sequence[Assignment], model: Model) -> str:
    """What a chain of the model with these stages promises about its results."""
    nodes = [node for stage in stages for node in stage.members]
    classes = [with_kv(name, model.kv_type) for name in classes_of(state, nodes, model)]
    promise = describe_exactness(classes, model.weight_form)
    shared = [stage for stage in stages if stage.ranks]
    known = [parse_class(name) for name in classes]
    if any(stage.exchange == "reduce" for stage in shared):
        return f"{promise}; ranks add up here: one machine, or other ranks, may give other tokens where two are near"
    if shared and not all(each is not None and each.has_exact_ranks for each in known):
        return f"{promise}; between ranks and one machine tokens may differ where two are near"
    return promise


def explain_bottleneck(plan: Placement, names: Mapping[str, str]) -> str:
    """What one would have to make faster first."""
    compute_s = sum(stage.step_s for stage in plan.stages)
    slowest = max(plan.stages, key=lambda stage: stage.step_s)
    name = _who(slowest, names, {})
    if plan.hops_s > compute_s:
        return (
            f"bottleneck: the network, {format_seconds(plan.hops_s)} a token on "
            f"{count_of(len(plan.stages) + 1, 'hop')} against {format_seconds(compute_s)} of computing"
        )
    if len(plan.stages) == 1:
        return f"bottleneck: {name}, which {'do everything together' if slowest.ranks else 'does everything'}"
    return (
        f"bottleneck: {name}, {format_seconds(slowest.step_s)} of {format_seconds(compute_s)} "
        f"of computing a token; the network adds {format_seconds(plan.hops_s)}"
    )


def explain_step(stages: Sequence[tuple[Assignment, float]], hops_s: float, names: Mapping[str, str]) -> str:
    """What held back a step that was measured: stages with the seconds they computed, and what the way around takes."""
    compute_s = sum(seconds for _, seconds in stages)
    slowest, slowest_s = max(stages, key=lambda stage: stage[1])
    name = " + ".join(names.get(node, node) for node in slowest.members)
    if hops_s > compute_s:
        return (
            f"bottleneck: the network, about {format_seconds(hops_s)} on {count_of(len(stages) + 1, 'hop')} "
            f"against {format_seconds(compute_s)} of computing in the newest step"
        )
    if len(stages) == 1:
        does = "do everything together" if slowest.ranks else "does everything"
        return f"bottleneck: {name}, which {does}: {format_seconds(compute_s)} in the newest step"
    return (
        f"bottleneck: {name}, {format_seconds(slowest_s)} of {format_seconds(compute_s)} of computing "
        f"in the newest step; the network adds about {format_seconds(hops_s)}"
    )
