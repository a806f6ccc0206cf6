"""What if: what a model's plan would become with machines that are not there, in one sentence. Nothing is loaded."""

from __future__ import annotations

from msgspec.structs import replace

from shardcompute.control.cost.tokens import format_price
from shardcompute.control.cost.what_if import ImaginedMachines, most_kv_tokens, with_machines
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.placement.request import placement_request
from shardcompute.control.state import ClusterState, Model
from shardcompute.core.units import format_rate
from shardcompute.node.admin.dry_run import plan_model
from shardcompute.node.admin.views import PlannedChain, WhatIfView


def imagine(
    state: ClusterState,
    model: Model,
    machines: ImaginedMachines,
    now_s: float,
    parallel: Parallelism | None = None,
    price_per_kwh: float | None = None,
) -> WhatIfView:
    """One chain of `model`, without these machines and with them."""
    imagined = with_machines(state, machines)
    before, after = (
        plan_model(each, model, 1, now_s, parallel, price_per_kwh=price_per_kwh).chains[0]
        for each in (state, imagined.state)
    )
    tokens_before, tokens_after = (
        most_kv_tokens(placement_request(_without(each, model), model, now_s, has_shared=True))
        for each in (state, imagined.state)
    )
    is_used = any(stage.node in imagined.nodes for stage in after.stages)
    changes = [
        *_told_speed(before, after, is_used),
        _told_room(tokens_before, tokens_after),
        *_told_cost(before, after),
    ]
    return WhatIfView(
        told=f"with {machines.told()} ({imagined.assumed}): {', '.join(changes)}",
        assumed=imagined.assumed,
        is_used=is_used,
        before=before,
        after=after,
        kv_tokens_before=tokens_before,
        kv_tokens_after=tokens_after,
    )


def _without(state: ClusterState, model: Model) -> ClusterState:
    """As if none of it were there yet."""
    chains = {id: chain for id, chain in state.chains.items() if chain.model != model.name}
    return replace(state, chains=chains)


def _told_speed(before: PlannedChain, after: PlannedChain, is_used: bool) -> list[str]:
    if not after.is_possible:
        return ["it still does not fit"]
    one, many = after.predicted_tokens_per_s_one_stream, after.predicted_tokens_per_s_many
    if not before.is_possible:
        return [f"it would fit, with {format_rate(one)} for one stream and {format_rate(many)} for many"]
    if not is_used:
        return [f"no more than the {format_rate(one)} of now, the model would run without it"]
    return [
        f"one stream from {format_rate(before.predicted_tokens_per_s_one_stream)} to {format_rate(one)}",
        f"many from {format_rate(before.predicted_tokens_per_s_many)} to {format_rate(many)}",
    ]


def _told_room(before: int, after: int) -> str:
    return f"memory for {before:,} tokens of context becomes memory for {after:,}"


def _told_cost(before: PlannedChain, after: PlannedChain) -> list[str]:
    if before.cost is None or after.cost is None:
        return []
    if before.cost.price_many is not None and after.cost.price_many is not None:
        return [
            f"a million tokens of many streams from {format_price(before.cost.price_many)} to "
            f"{format_price(after.cost.price_many)}"
        ]
    if before.cost.kwh_many is not None and after.cost.kwh_many is not None:
        return [
            f"a million tokens of many streams from {before.cost.kwh_many:.3g} to {after.cost.kwh_many:.3g} kWh"
        ]
    return ["what that costs is not known"]
