"""Which drafters a chain has: whether each is at work, how often it was right, and why one that should be is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from shardcompute.control.state import Chain, ClusterState, HeldDraftHead
from shardcompute.core.units import format_bytes
from shardcompute.decoding.drafting import HEAD_DRAFTER

_NOTHING: Mapping[str, float] = MappingProxyType({})
DrafterState = Literal["at work", "loading", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterView:
    """`accepted_share` is of the tokens that it drafted, `rounds_share` of all rounds; None: none was
    counted yet."""

    drafter: str
    state: DrafterState
    text: str
    """All of it in words."""
    accepted_share: float | None = None
    rounds_share: float | None = None


def view_drafters(
    state: ClusterState,
    chain: Chain,
    router: Mapping[str, float] = _NOTHING,
    *,
    problem: str | None = None,
) -> tuple[DrafterView, ...]:
    """`router` is what the chain's router of drafts has measured (`decoding.routing`); `problem` is why no last stage
    can draft although its model has a draft head ("": it can), None where it has none."""
    views = [_at_work("ngram", "", router)]
    if (head := _view_draft_head(state, chain, router, problem)) is not None:
        views.append(head)
    requested = state.models.get(chain.model)
    if requested is not None and requested.has_draft_model:
        views.append(_at_work("model", "at the coordinator", router))
    return tuple(views)


def _view_draft_head(
    state: ClusterState, chain: Chain, router: Mapping[str, float], problem: str | None
) -> DrafterView | None:
    if problem:
        told = f"{HEAD_DRAFTER}: missing: {problem}"
        return DrafterView(drafter=HEAD_DRAFTER, state="missing", text=told)
    node = state.nodes.get(chain.stages[-1].node) if chain.stages else None
    if node is None:
        return None
    # Of what its last stage has not told yet with a heartbeat nothing is known.
    unknown = None if problem is None else HeldDraftHead(chain.id)
    held = next((each for each in node.draft_heads if each.chain == chain.id), unknown)
    if held is None:
        return None
    if held.problem:
        told = f"{HEAD_DRAFTER}: missing on {node.name}: {held.problem}"
        return DrafterView(drafter=HEAD_DRAFTER, state="missing", text=told)
    if not held.size_bytes:
        told = f"{HEAD_DRAFTER}: {node.name} loads it"
        return DrafterView(drafter=HEAD_DRAFTER, state="loading", text=told)
    return _at_work(HEAD_DRAFTER, f"on {node.name} ({format_bytes(held.size_bytes)})", router)


def _at_work(drafter: str, where: str, router: Mapping[str, float]) -> DrafterView:
    accepted, rounds = (_share(router, f"{name}_{drafter}") for name in ("acceptance", "share"))
    told = [f"{drafter}: at work {where}".rstrip()]
    if rounds is not None:
        told.append(f"in {rounds:.0%} of rounds")
    if accepted is not None and rounds:
        told.append(f"{accepted:.0%} of its tokens right")
    return DrafterView(
        drafter=drafter,
        state="at work",
        text=", ".join(told),
        accepted_share=accepted,
        rounds_share=rounds,
    )


def _share(router: Mapping[str, float], name: str) -> float | None:
    """In whole per cents, so that it is news only when it is one."""
    return round(router[name], 2) if name in router else None
