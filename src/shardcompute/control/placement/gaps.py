"""Gaps: how far a plan may be from the best that its machines allow, by a lower bound that holds for every layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.cost_model import score_of
from shardcompute.control.placement.place import Placement, offers_for
from shardcompute.control.placement.rank_groups import offers_of
from shardcompute.control.placement.search_space import space_of
from shardcompute.control.solver.bounds import Bound, bound_layouts
from shardcompute.control.solver.held_karp import exact_floors
from shardcompute.control.solver.space import SearchSpace
from shardcompute.core.units import format_rate

_EXACT_LIMIT = 8
"""Machines of which the shortest and the fastest layout are found exactly: some tenths of a second."""


@dataclass(frozen=True, slots=True)
class PlanGap:
    """Of a plan: no layout of its machines is worth more than `1 / (1 - gap)` times as much."""

    gap: float
    most_one_stream: float
    """Tokens a second that no layout exceeds, each by itself: one for one stream alone need not have the other."""
    most_many: float
    has_groups: bool
    """The plan has machines that compute together; other groups of them are not counted as layouts."""

    def told(self) -> str:
        """In words, for people."""
        within = (
            "the best possible" if self.gap < 0.0005 else f"within {_percent(self.gap)} of the best possible"
        )
        groups = " with these groups" if self.has_groups else ""
        return (
            f"{within}: no layout of these machines{groups} gives more than {format_rate(self.most_one_stream)} "
            f"for one stream, or more than {format_rate(self.most_many)} for many"
        )


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %" if part < 0.0995 else f"{100 * part:.0f} %"


@lru_cache(maxsize=32)
def gap_of(request: Request, plan: Placement) -> PlanGap:
    """What is left to gain at most, with the driver where the request has it and as many stages as it asks for."""
    offers = _units(request, plan)
    asked = request.parallel.pp if request.parallel.pp == len(plan.stages) else 0
    most = 1 if request.model.is_whole else asked or None
    bound = _bound(space_of(replace(request, offers=offers)), asked or 1, most)
    one, many = plan.predicted_tokens_per_s_one_stream, plan.predicted_tokens_per_s_many
    has_groups = any(stage.ranks for stage in plan.stages)
    if bound is None:
        # There is a plan, so this is rounding: it bounds itself.
        return PlanGap(0.0, one, many, has_groups)
    machines = sum(len(stage.assignment.members) for stage in plan.stages)
    worth = score_of(1 / one, 1 / many, machines, request.policy).score
    return PlanGap(
        gap=max(0.0, 1 - worth / bound.score),
        most_one_stream=max(one, 1 / max(bound.latency_s, 1e-9)),
        most_many=max(many, 1 / max(bound.bottleneck_s, 1e-9)),
        has_groups=has_groups,
    )


def _bound(space: SearchSpace, least: int, most: int | None) -> Bound | None:
    """Of few machines with what is known exactly, of many as close as it gets."""
    quick, _ = bound_layouts(space, least, most)
    if quick is None or space.count > _EXACT_LIMIT:
        return quick and bound_layouts(space, least, most, is_close=True)[0]
    floors = exact_floors(space, quick.bottleneck_s, least, most)
    return bound_layouts(space, least, most, is_close=True, floors=floors)[0]


def _units(request: Request, plan: Placement) -> tuple[NodeCapacity, ...]:
    """Machines that could have been used, those that compute together in the plan as one."""
    table = offers_of(request)
    groups = [table[stage.assignment] for stage in plan.stages if stage.ranks]
    taken = {node for group in groups for node in group.members}
    alone = [offer for offer in offers_for(request, plan.nodes) if offer.node not in taken]
    return tuple(sorted((*groups, *alone), key=lambda offer: offer.node))
