"""What loading a model would lead to: where it would run, why there, and how fast. Nothing is loaded.

Sizes come from the model's headers and are those that placement works with (see `weights.served`): a form that
shrinks the model counts by the bits of a weight, any other travels as the file has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from shardcompute.control.cost.tokens import cost_of
from shardcompute.control.driver_placement import DriverPlacement, choose_driver_placement, with_driver_on
from shardcompute.control.explain import device_words, explain_bottleneck, explain_exactness, explain_plan
from shardcompute.control.placement.alternatives import reason_of_choice, weigh_alternatives
from shardcompute.control.placement.capacities import Request
from shardcompute.control.placement.cost_model import first_token_s
from shardcompute.control.placement.gaps import PlanGap, gap_of
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.placement.place import PlacedStage, Placement, Unplaceable, place, place_chains
from shardcompute.control.placement.request import placement_request, speed_source
from shardcompute.control.roles.seeding import duty_of
from shardcompute.control.sizes import StageBytes, layer_work, parts_of, runner_of, sizes_of, tensor_terms
from shardcompute.control.state import ClusterState, Model, RequestedModel
from shardcompute.control.transitions.state_updates import claimed_bytes
from shardcompute.control.wording import layout_in_words
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.core.settings import Settings
from shardcompute.core.units import format_rate, format_seconds
from shardcompute.models.layout import EMBEDDING, TOWER, TensorPlace
from shardcompute.node.admin.view_builder import held_usually, view_parts
from shardcompute.node.admin.views import LeftOut, PlannedAlternative, PlannedChain, PlannedStage, PlanView
from shardcompute.weights.adapter_pack import key_of_adapters
from shardcompute.weights.adapters import adapter_bytes
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.held import column_block, held_sizes_of_entries, with_held_adapters
from shardcompute.weights.loader import place_bytes
from shardcompute.weights.outline import outline
from shardcompute.weights.sources.cache import ModelCache
from shardcompute.weights.sources.catalogue import KnownModel, find_known_reference
from shardcompute.weights.sources.reference import EmbeddedReference, HubReference, ModelReference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.weights.sources.wheel import find_installed

_PROMPT_TOKENS = 1000
# Of the forms that round, with the scale (and shift) of each block.
_BITS_PER_WEIGHT = {"int8": 9.0, "int4": 6.0, "mixed": 9.2}


def open_headers(reference: ModelReference, settings: Settings) -> Checkpoint:
    """The model's headers and config. Of a model that is not here no weights are fetched; of one that the catalogue
    knows nothing is: what is said there is enough to size it up."""
    known = unfetched(reference, settings)
    if known is not None:
        return outline(known)
    return open_checkpoint(resolve(reference, settings, fetch="lazy"))


def unfetched(reference: ModelReference, settings: Settings) -> KnownModel | None:
    """What the catalogue says of a model that is not on this machine; None of any other."""
    if not isinstance(reference, EmbeddedReference | HubReference):
        return None
    known = find_known_reference(str(reference))
    if known is None or ModelCache(settings.data_dir).find(reference) is not None:
        return None
    return None if isinstance(reference, EmbeddedReference) and find_installed() else known


def size_up(
    checkpoint: Checkpoint,
    form: str,
    *,
    kv_tokens: int,
    context_length: int,
    kv_type: KvType = DEFAULT_KV_TYPE,
) -> Model:
    """The sizes of a model in a form, from its headers alone."""
    spec, layout = checkpoint.spec, checkpoint.layout

    def stored(place: TensorPlace) -> int:
        return place_bytes(checkpoint.tensors, place)

    def rounded(place: TensorPlace) -> int:
        is_matrix = len(place.shape) > 1
        return round(math.prod(place.shape) * _BITS_PER_WEIGHT[form] / 8) if is_matrix else stored(place)

    places = [place for part in (layout.model, *layout.layers) for place in part.values()]
    shrinks = form in _BITS_PER_WEIGHT and sum(map(rounded, places)) < sum(map(stored, places))
    size_of = rounded if shrinks else stored
    added = [adapter_bytes(checkpoint.adapters, layer) for layer in range(spec.layer_count)]
    layer_bytes = tuple(
        sum(map(size_of, layer.values())) + more for layer, more in zip(layout.layers, added, strict=True)
    )
    return Model(
        name=checkpoint.name,
        layer_bytes=layer_bytes,
        work_bytes=layer_work(spec, layer_bytes),
        embedding_bytes=sum(
            (stored if name.startswith(TOWER) else size_of)(place)
            for name, place in layout.model.items()
            if name.startswith(EMBEDDING)
        ),
        head_bytes=size_of(layout.model["head"]) + size_of(layout.model["norm"]),
        kv_bytes_per_token_and_layer=spec.kv_bytes_per_token_and_layer(kv_type),
        kv_type=kv_type,
        kv_tokens=kv_tokens,
        hidden=spec.hidden,
        context_length=min(context_length, spec.context_length),
        weight_form=form,
        is_head_tied=spec.tied_head,
        runner=runner_of(spec),
        is_whole=spec.is_whole,
        adapters=key_of_adapters(checkpoint.adapters),
        held=with_held_adapters(
            held_sizes_of_entries(
                spec, layout, checkpoint.tensors.entries, form, context_length=context_length
            ),
            added,
        ),
        tensor=tensor_terms(spec, lambda: column_block(layout, checkpoint.tensors.entries, form)),
        sees=spec.vision is not None,
    )


def plan_model(
    state: ClusterState,
    model: Model,
    chains: int,
    now_s: float,
    parallel: Parallelism | None = None,
    *,
    has_alternatives: bool = False,
    price_per_kwh: float | None = None,
) -> PlanView:
    """Where `chains` chains of `model` would go if none of it were there yet, cut so (None: as was asked for).
    `price_per_kwh` None: as the cluster was told."""
    price = state.placing.price_per_kwh if price_per_kwh is None else price_per_kwh
    others = {id: chain for id, chain in state.chains.items() if chain.model != model.name}
    state = _asking(replace(state, chains=others), model, parallel)
    request = placement_request(state, model, now_s)
    plans = place_chains(request, chains)
    if isinstance(plans[0], Unplaceable):
        request = placement_request(state, model, now_s, has_shared=True)
        shared = place(request)
        plans = [shared if isinstance(shared, Placement) else plans[0]]
    names = {id: node.name for id, node in state.nodes.items()}
    devices = {id: device_words(node) for id, node in state.nodes.items()}
    sources = {id: speed_source(node, model) for id, node in state.nodes.items()}
    others_weighed = _alternatives(state, request, plans[0]) if has_alternatives else _NOTHING_ELSE
    first_tokens_s = [_first_token_s(request, plan) for plan in plans]
    drivers = [_driver_of(state, plan, model.name) for plan in plans]
    plans = [
        with_driver_on(plan, request, driver.node or state.driver)
        if isinstance(plan, Placement) and driver is not None
        else plan
        for plan, driver in zip(plans, drivers, strict=True)
    ]
    gaps = _gaps(
        request, plans, [state.driver if each is None else each.node or state.driver for each in drivers]
    )
    memory = view_parts(*_parts(state, model, plans[0]))
    costs = [cost_of(state, plan, price) if isinstance(plan, Placement) else None for plan in plans]
    return PlanView(
        model=model.name,
        form=model.weight_form,
        layer_count=model.layer_count,
        memory_bytes=memory.total_bytes,
        file_bytes=sizes_of(model).file_bytes,
        parts=memory,
        text="\n\n".join(
            "\n".join(
                [
                    explain_plan(plan, model, names, devices, sources, first_s, gap),
                    *(_told_alternatives(others_weighed) if plan is plans[0] else ()),
                    *_told_duties(state, model, plan),
                    *([driver.told(names)] if driver is not None else []),
                    *filter(None, [_exactness(state, plan, model)]),
                    *(() if cost is None else cost.told()),
                ]
            )
            for plan, driver, first_s, gap, cost in zip(
                plans, drivers, first_tokens_s, gaps, costs, strict=True
            )
        ),
        chains=tuple(
            replace_fields(
                _planned(state, model, plan, driver, _exactness(state, plan, model), sources),
                predicted_first_token_s=first_s,
                gap=None if gap is None else gap.gap,
                most_tokens_per_s_one_stream=None if gap is None else gap.most_one_stream,
                most_tokens_per_s_many=None if gap is None else gap.most_many,
                alternatives=others_weighed.each if plan is plans[0] else (),
                reason_of_choice=others_weighed.reason if plan is plans[0] else "",
                cost=cost,
                cost_told=() if cost is None else cost.told(),
            )
            for plan, driver, first_s, gap, cost in zip(
                plans, drivers, first_tokens_s, gaps, costs, strict=True
            )
        ),
    )


def _gaps(
    request: Request, plans: Sequence[Placement | Unplaceable], drivers: Sequence[str]
) -> list[PlanGap | None]:
    """How far each copy may be from the best that the machines allow which the others leave."""
    used = [plan.nodes if isinstance(plan, Placement) else frozenset[str]() for plan in plans]
    gaps: list[PlanGap | None] = []
    for i, (plan, driver) in enumerate(zip(plans, drivers, strict=True)):
        others = frozenset[str]().union(*(nodes for j, nodes in enumerate(used) if j != i))
        left = tuple(offer for offer in request.offers if offer.node not in others)
        terms = replace_fields(request, offers=left, driver=driver)
        gaps.append(gap_of(terms, plan) if isinstance(plan, Placement) else None)
    return gaps


@dataclass(frozen=True, slots=True)
class _Weighed:
    """What other kinds of layouts would do, and why they were not chosen."""

    each: tuple[PlannedAlternative, ...]
    reason: str


_NOTHING_ELSE = _Weighed((), "")


def _alternatives(state: ClusterState, request: Request, plan: Placement | Unplaceable) -> _Weighed:
    if isinstance(plan, Unplaceable):
        return _NOTHING_ELSE
    found = weigh_alternatives(request, plan)
    views = tuple(
        PlannedAlternative(
            kind=each.kind,
            layout=layout_in_words(state, each.stages),
            machines=sum(len(stage.members) for stage in each.stages),
            predicted_token_s=each.token_s,
            predicted_tokens_per_s_one_stream=each.one_stream,
            predicted_tokens_per_s_many=each.many_streams,
            score=each.score,
            is_chosen=each.is_chosen,
        )
        for each in found
    )
    return _Weighed(views, reason_of_choice(request, found))


def _told_alternatives(weighed: _Weighed) -> Iterator[str]:
    if len(weighed.each) < 2:
        return
    yield "alternatives:"
    for each in weighed.each:
        mark = " ← chosen" if each.is_chosen else ""
        yield (
            f"  {each.kind}: {each.layout}: {format_seconds(each.predicted_token_s)} a token, "
            f"{format_rate(each.predicted_tokens_per_s_one_stream)} for one stream, "
            f"{format_rate(each.predicted_tokens_per_s_many)} for many{mark}"
        )
    yield f"chosen: {weighed.reason}"


def _asking(state: ClusterState, model: Model, parallel: Parallelism | None) -> ClusterState:
    """As if somebody had asked for the model to be cut so."""
    if parallel is None:
        return state
    known = state.models.get(model.name)
    asked = RequestedModel(model, 1) if known is None else known
    return replace(state, models={**state.models, model.name: replace(asked, parallel=parallel)})


def _told_duties(state: ClusterState, model: Model, plan: Placement | Unplaceable) -> Iterator[str]:
    """What those do who are left out."""
    if isinstance(plan, Placement):
        for node, _ in plan.unused:
            duty = duty_of(state, model, plan, node)
            if duty:
                yield f"  {state.nodes[node].name}: {duty}"


def _first_token_s(request: Request, plan: Placement | Unplaceable) -> float | None:
    return None if isinstance(plan, Unplaceable) else first_token_s(request, plan.assignments, _PROMPT_TOKENS)


def _exactness(state: ClusterState, plan: Placement | Unplaceable, model: Model) -> str:
    """What the classes of a plan's stages promise."""
    if isinstance(plan, Unplaceable):
        return ""
    return explain_exactness(state, plan.assignments, model)


def _parts(state: ClusterState, model: Model, plan: Placement | Unplaceable) -> list[StageBytes]:
    """Of a chain as planned; of one that cannot be, on one machine."""
    if isinstance(plan, Placement):
        return [stage.held for stage in plan.stages]
    return [held_usually(state, model).parts(0, model.layer_count)]


def _driver_of(state: ClusterState, plan: Placement | Unplaceable, model: str) -> DriverPlacement | None:
    """Where the driver would sit. A draft model drafts for every model that is served."""
    if isinstance(plan, Unplaceable):
        return None
    others = (each for each in state.models.values() if each.has_draft_model)
    requested = state.models.get(model) or next(others, None)
    nodes = [stage.node for stage in plan.stages]
    return choose_driver_placement(
        state, nodes, requested, compute_s=sum(stage.step_s for stage in plan.stages)
    )


def _planned(
    state: ClusterState,
    model: Model,
    plan: Placement | Unplaceable,
    driver: DriverPlacement | None,
    exactness: str,
    sources: Mapping[str, str],
) -> PlannedChain:
    names = {id: node.name for id, node in state.nodes.items()}
    if isinstance(plan, Unplaceable):
        return PlannedChain(is_possible=False, reasons=plan.reasons, missing_bytes=plan.missing_bytes)
    return PlannedChain(
        is_possible=True,
        reasons=plan.reasons,
        stages=tuple(
            _planned_stage(state, model, stage, node, sources)
            for stage in plan.stages
            for node in stage.assignment.members
        ),
        left_out=tuple(
            LeftOut(node=node, name=names.get(node, node), why=why, duty=duty_of(state, model, plan, node))
            for node, why in plan.unused
        ),
        predicted_tokens_per_s_one_stream=plan.predicted_tokens_per_s_one_stream,
        predicted_tokens_per_s_many=plan.predicted_tokens_per_s_many,
        bottleneck=explain_bottleneck(plan, names),
        exactness=exactness,
        driver_host="" if driver is None else driver.node,
        driver_host_reason="" if driver is None else driver.told(names),
    )


def _planned_stage(
    state: ClusterState, model: Model, stage: PlacedStage, id: str, sources: Mapping[str, str]
) -> PlannedStage:
    """What one of those who compute a stage would have of it."""
    node, place = state.nodes[id], stage.assignment.place_of(id)
    parts = parts_of(state, model, stage.assignment, id)
    return PlannedStage(
        node=id,
        name=node.name,
        start=stage.start,
        stop=stage.stop,
        memory_bytes=parts.total_bytes,
        predicted_s=stage.step_s,
        rank=0 if place is None else place.rank,
        ranks=len(stage.assignment.members),
        weight=1 if place is None else place.weights[place.rank],
        exchange="" if place is None else place.exchange,
        speed_source=sources.get(id, ""),
        parts=view_parts(parts),
        process_bytes=node.process_bytes,
        used_bytes=claimed_bytes(state, id),
        offered_bytes=node.memory_bytes,
        device=node.device,
        device_label=node.device_label,
        device_bytes=node.device_bytes,
    )
