"""From what the coordinator believes to what people see; pure, so that any state can be looked at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from types import MappingProxyType
from urllib.parse import urlsplit

from shardcompute.backends.exactness import is_mixed
from shardcompute.control.cost.tokens import cost_of
from shardcompute.control.driver_placement import current_host, driver_placement_of
from shardcompute.control.drivers import round_trip_s
from shardcompute.control.explain import (
    classes_of,
    explain_bottleneck,
    explain_exactness,
    explain_step,
    report_models,
)
from shardcompute.control.placement.cost_model import hops_of, score, stage_s
from shardcompute.control.placement.place import PlacedStage, Placement
from shardcompute.control.placement.rank_groups import offers_of
from shardcompute.control.placement.request import placement_request
from shardcompute.control.roles.seeding import told_role
from shardcompute.control.sizes import HeldSums, StageBytes, parts_of, sizes_of, sums_of, usual_holding
from shardcompute.control.state import (
    Assignment,
    Chain,
    ClusterState,
    Model,
    Node,
    RequestedModel,
    Shard,
    is_loaded,
    loaded_fraction,
)
from shardcompute.node.admin.drafters import view_drafters
from shardcompute.node.admin.views import (
    CachedLayers,
    ChainView,
    DriverView,
    HeldLayers,
    LinkView,
    LoadFailure,
    LoadingLayers,
    MemoryParts,
    ModelView,
    MoveView,
    NodeView,
    RankView,
    ServingStatus,
    SpeedView,
    StageTimes,
    StageView,
    UnusedDeviceView,
    by_name,
)
from shardcompute.trust.pools import standing_in_words
from shardcompute.wire import StageTiming

_SHOWN_MOVES = 5
Timings = Mapping[str, Sequence[StageTiming]]
Routers = Mapping[str, Mapping[str, float]]
"""By chain, what its router of drafts has measured."""


def view_nodes(state: ClusterState, now_s: float) -> tuple[NodeView, ...]:
    views = (_view_node(state, node, now_s) for node in state.nodes.values())
    return tuple(sorted(views, key=by_name))


def _view_node(state: ClusterState, node: Node, now_s: float) -> NodeView:
    parts = {shard: _parts_of_shard(state, node, shard) for shard in node.shards}
    return NodeView(
        id=node.id,
        name=node.name,
        status=node.status,
        status_reason=node.status_reason or node.rest_reason,
        role=node.role,
        device=node.device,
        backend=node.backend,
        device_label=node.device_label,
        device_bytes=node.device_bytes,
        device_remark=node.device_remark,
        exactness=node.exactness,
        fallback=node.fallback,
        unused_devices=tuple(
            UnusedDeviceView(
                device=each.device,
                label=each.label,
                memory_bytes=each.memory_bytes,
                problem=each.problem,
                fix=each.fix,
            )
            for each in node.unused_devices
        ),
        threads=node.threads,
        version=node.version,
        address=node.address,
        memory_bytes=node.memory_bytes,
        used_bytes=node.process_bytes + sum(shard.size_bytes for shard in node.shards),
        resident_bytes=node.resident_bytes,
        is_draining=node.is_draining,
        reputation=node.reputation,
        attested=node.attested,
        audits=node.audits,
        audits_failed=node.audits_failed,
        standing=standing_in_words(state.pool[node.id], state.pooling) if node.id in state.pool else "",
        rest_reason=node.rest_reason,
        is_standby=node.is_standby,
        layers=tuple(
            HeldLayers(
                chain=shard.chain,
                model=shard.model,
                start=shard.start,
                stop=shard.stop,
                size_bytes=shard.size_bytes,
                parts=view_parts(parts[shard]),
            )
            for shard in node.shards
        ),
        loading=tuple(
            LoadingLayers(chain=each.chain, start=each.start, stop=each.stop, fraction=each.fraction)
            for each in node.loading
        ),
        cached=tuple(
            CachedLayers(model=each.model, start=each.start, stop=each.stop) for each in node.cached
        ),
        failures=tuple(
            LoadFailure(model=refusal.model, reason=refusal.reason, failures=refusal.failures)
            for refusal in node.refusals
            if now_s < refusal.until_s
        ),
        api_url=node.api_url,
        watts=node.watts,
        idle_watts=node.idle_watts,
        price_per_hour=node.price_per_hour,
        seeded_bytes=node.seeded_bytes,
        duty=told_role(state, node),
        memory_reason=node.memory_reason,
        weights_bytes_per_s=1 / node.seconds_per_byte if node.seconds_per_byte else 0.0,
        overhead_s=node.overhead_s,
        probed_at_s=node.probed_at_s,
        speeds=_view_speeds(state, node),
        process_bytes=node.process_bytes,
        parts=view_parts(*parts.values()),
        kv_used_bytes=node.kv_used_bytes,
    )


def _parts_of_shard(state: ClusterState, node: Node, shard: Shard) -> StageBytes:
    """As the node holds it; of what is no longer known all counts as weights."""
    requested = state.models.get(shard.model)
    if requested is None:
        return StageBytes(shard.size_bytes, 0, 0)
    held = sums_of(requested.model, node.holding_of(requested.model), shard.tensor)
    parts = held.parts(shard.start, shard.stop)
    known = min(shard.size_bytes, parts.scratch_bytes + parts.kv_bytes)
    return StageBytes(
        shard.size_bytes - known, known - min(known, parts.kv_bytes), min(known, parts.kv_bytes)
    )


def view_parts(*parts: StageBytes) -> MemoryParts:
    """Their sum."""
    return MemoryParts(
        held_weights_bytes=sum(each.weights_bytes for each in parts),
        scratch_bytes=sum(each.scratch_bytes for each in parts),
        kv_reserved_bytes=sum(each.kv_bytes for each in parts),
    )


def held_usually(state: ClusterState, model: Model) -> HeldSums:
    """The model as most machines of the cluster would hold it."""
    return sizes_of(model).on(
        usual_holding(node.holding_of(model) for node in state.nodes.values() if node.can_work)
    )


def _view_speeds(state: ClusterState, node: Node) -> tuple[SpeedView, ...]:
    views = [
        SpeedView(
            model=time.model,
            layer_s=time.seconds,
            batch_layer_s=time.batch_s,
            prefill_layer_s=time.prefill_s,
            layer_count=state.models[time.model].model.layer_count if time.model in state.models else 0,
            source="service" if time.is_served else "load",
            measured_at_s=time.measured_at_s,
        )
        for time in node.layer_times
    ]
    return tuple(sorted(views, key=lambda view: (view.layer_count == 0, view.model)))


def view_links(state: ClusterState, own_url: str = "") -> tuple[LinkView, ...]:
    """`own_url` is where the coordinator itself is reached."""
    hosts = {id: _host(node.address) for id, node in state.nodes.items()} | {state.driver: _host(own_url)}
    return tuple(
        LinkView(
            a=link.a,
            b=link.b,
            rtt_s=link.rtt_s,
            bytes_per_s=link.bytes_per_s,
            is_open=link.is_open,
            is_local=bool(hosts.get(link.a)) and hosts.get(link.a) == hosts.get(link.b),
            rung=link.rung,
            remark=link.remark,
        )
        for a in sorted(state.links)
        for _, link in sorted(state.links[a].items())
    )


def _host(url: str) -> str:
    """The machine that an address names; "" where it names none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def view_models(state: ClusterState, now_s: float, seeing: Collection[str] = ()) -> tuple[ModelView, ...]:
    """`seeing` are the names of those that take images."""
    reports = {report.model: report for report in report_models(state, now_s)}
    views = []
    for name in sorted(state.models):
        report = reports.get(name)
        views.append(
            _view_model(state, state.models[name])
            if report is None
            else _view_model(
                state,
                state.models[name],
                status=report.status,
                ready_chains=report.ready_chains,
                missing_bytes=report.missing_bytes,
                reasons=report.reasons,
            )
        )
    return tuple(replace(view, sees=True) if view.name in seeing else view for view in views)


def _view_model(
    state: ClusterState,
    requested: RequestedModel,
    *,
    status: ServingStatus = "unloading",
    ready_chains: int = 0,
    missing_bytes: int = 0,
    reasons: tuple[str, ...] = (),
) -> ModelView:
    model = requested.model
    chain = next(iter(state.live_chains(model.name)), None)
    parts = (
        [held_usually(state, model).parts(0, model.layer_count)]
        if chain is None
        else [parts_of(state, model, stage, node) for stage in chain.stages for node in stage.members]
    )
    memory = view_parts(*parts)
    return ModelView(
        name=model.name,
        status=status,
        weight_form=model.weight_form,
        backend=model.backend,
        backend_reason=model.backend_reason,
        layer_count=model.layer_count,
        context_length=model.context_length,
        kv_tokens=model.kv_tokens,
        memory_bytes=memory.total_bytes,
        file_bytes=sizes_of(model).file_bytes,
        parts=memory,
        ready_chains=ready_chains,
        wanted_chains=requested.wanted_chains,
        missing_bytes=missing_bytes,
        reasons=reasons,
        runner=model.runner,
        kv_type=model.kv_type,
        is_kept=requested.is_kept,
    )


def view_chains(
    state: ClusterState,
    now_s: float,
    timings: Timings,
    routers: Routers = MappingProxyType({}),
    draft_heads: Mapping[str, str] = MappingProxyType({}),
) -> tuple[ChainView, ...]:
    """Chains that are not retired. `draft_heads` has the models whose last stages are to draft, each with why they
    cannot."""
    return tuple(
        replace(
            _view_chain(state, chain, now_s, timings.get(chain.id, ())),
            drafters=view_drafters(
                state, chain, routers.get(chain.id, {}), problem=draft_heads.get(chain.model)
            ),
        )
        for chain in state.live_chains()
    )


def _view_chain(state: ClusterState, chain: Chain, now_s: float, timings: Sequence[StageTiming]) -> ChainView:
    plan = predict_chain(state, chain, now_s)
    seconds = {stage.node: stage.step_s for stage in plan.stages} if plan else {}
    times = {timing.node: timing for timing in timings}
    names = {id: node.name for id, node in state.nodes.items()}
    return ChainView(
        id=chain.id,
        model=chain.model,
        epoch=chain.epoch,
        status=chain.status,
        reason=chain.reason,
        missing_bytes=chain.missing_bytes,
        stages=tuple(
            _view_stage(state, chain, stage, seconds.get(stage.node), times.get(stage.node))
            for stage in chain.stages
        ),
        standbys=tuple(_view_stage(state, chain, standby) for standby in chain.standbys),
        predicted_tokens_per_s_one_stream=plan.predicted_tokens_per_s_one_stream if plan else None,
        predicted_tokens_per_s_many=plan.predicted_tokens_per_s_many if plan else None,
        bottleneck=_explain_bottleneck(chain, plan, times, names),
        cost_told=_explain_cost(state, plan),
        drivers=_view_drivers(state, chain),
        driver_host=current_host(chain),
        driver_host_reason=_explain_driver_host(state, chain, now_s, names),
        exactness=explain_exactness(state, chain.stages, state.models[chain.model].model),
        is_mixed=is_mixed(classes_of(state, chain.members, state.models[chain.model].model)),
        moves=_view_moves(state, chain),
        last_move=chain.last_move,
        is_moving=chain.target is not None,
    )


def _explain_cost(state: ClusterState, plan: Placement | None) -> tuple[str, ...]:
    """Nothing where nobody has said anything: people who do not care are not to be told so all the time."""
    cost = None if plan is None else cost_of(state, plan, state.placing.price_per_kwh)
    if cost is None or (cost.watts is None and cost.price_many is None):
        return ()
    return cost.told()


def _view_moves(state: ClusterState, chain: Chain) -> tuple[MoveView, ...]:
    own = [move for move in state.moves if move.chain == chain.id]
    return tuple(
        MoveView(
            number=move.number,
            reason=move.reason,
            outcome=move.outcome,
            expected_before_s=move.expected_before_s,
            expected_after_s=move.expected_after_s,
            measured_before_s=move.measured_before_s,
            measured_after_s=move.measured_after_s,
        )
        for move in own[: -_SHOWN_MOVES - 1 : -1]
    )


def _explain_bottleneck(
    chain: Chain, plan: Placement | None, times: Mapping[str, StageTiming], names: Mapping[str, str]
) -> str:
    """Of the step whose times are shown beside it; before there is one, as predicted."""
    if plan is None:
        return ""
    if all(stage.node in times for stage in chain.stages):
        return explain_step(
            [(stage, times[stage.node].compute_s) for stage in chain.stages], plan.hops_s, names
        )
    return explain_bottleneck(plan, names)


def _explain_driver_host(state: ClusterState, chain: Chain, now_s: float, names: Mapping[str, str]) -> str:
    told = driver_placement_of(state, chain, now_s).told(names)
    return told if current_host(chain) == chain.driver_host else f"{told}; it is being moved"


def _view_drivers(state: ClusterState, chain: Chain) -> tuple[DriverView, ...]:
    """Those that use the chain as it is now."""
    views = [
        DriverView(
            node=each.driver,
            kv_tokens=each.kv_tokens,
            round_trip_s=round_trip_s(state, chain, each.driver),
        )
        for each in chain.drivers
        if each.epoch == chain.epoch
    ]
    return tuple(
        sorted(views, key=lambda view: (inf if view.round_trip_s is None else view.round_trip_s, view.node))
    )


def _view_stage(
    state: ClusterState,
    chain: Chain,
    stage: Assignment,
    predicted_s: float | None = None,
    timing: StageTiming | None = None,
) -> StageView:
    model = state.models[chain.model].model
    parts = parts_of(state, model, stage)
    return StageView(
        node=stage.node,
        start=stage.start,
        stop=stage.stop,
        memory_bytes=parts.total_bytes,
        parts=view_parts(parts),
        fraction=_loaded_fraction(state, chain, stage),
        predicted_s=predicted_s,
        timing=None if timing is None else _view_timing(timing),
        ranks=tuple(
            RankView(
                node=seat.node,
                weight=seat.weight,
                memory_bytes=parts_of(state, model, stage, seat.node).total_bytes,
            )
            for seat in stage.ranks
        ),
        exchange=stage.exchange if stage.ranks else "",
    )


def _view_timing(timing: StageTiming) -> StageTimes:
    return StageTimes(
        queue_s=timing.queue_s,
        compute_s=timing.compute_s,
        codec_s=timing.codec_s,
        received_bytes=timing.received_bytes,
        codec=timing.codec,
        sent_bytes=timing.sent_bytes,
        exchange_s=timing.exchange_s,
        slowest=timing.slowest,
    )


def _loaded_fraction(state: ClusterState, chain: Chain, stage: Assignment) -> float:
    # Everything fetched is not everything loaded: 1 is said only of what answers.
    is_there = is_loaded(state, chain, stage)
    return 1.0 if is_there else min(loaded_fraction(state, chain, stage), 0.999)


def predict_chain(state: ClusterState, chain: Chain, now_s: float) -> Placement | None:
    """What a chain as it stands should do; None where a node or link of it is missing."""
    model = state.models[chain.model].model
    request = placement_request(state, model, now_s, chain=chain, has_draining=True, has_shared=True)
    request = replace(request, driver=current_host(chain) or state.driver)
    offers = offers_of(request)
    hops_s = hops_of(request).ring_s(chain.nodes)
    if any(offers.find(stage) is None for stage in chain.stages) or not isfinite(hops_s):
        return None
    worth = score(request, chain.stages)
    return Placement(
        stages=tuple(
            PlacedStage(
                stage.node,
                stage.start,
                stage.stop,
                parts_of(state, model, stage),
                stage_s(request.sizes, offers[stage], stage.start, stage.stop),
                stage.ranks,
                stage.exchange,
            )
            for stage in chain.stages
        ),
        predicted_tokens_per_s_one_stream=worth.one_stream,
        predicted_tokens_per_s_many=worth.many_streams,
        hops_s=hops_s,
        score=worth.score,
        reasons=(),
        unused=(),
        standbys=chain.standbys,
    )
