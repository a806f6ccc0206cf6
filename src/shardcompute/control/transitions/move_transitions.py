"""How moves of serving chains change the state, and the record that is kept of each: what, why, what was expected, and
what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.state import Assignment, Chain, ClusterState, Move
from shardcompute.control.transitions.state_updates import forget_moves

_KEPT = 32
_KEPT_LIVES = 4


def record_plan(state: ClusterState, chain: Chain, event: happened.MovePlanned) -> ClusterState:
    number = state.moves_planned + 1
    move = Move(
        number,
        chain.id,
        chain.model,
        event.reason,
        event.now_s,
        event.is_urgent,
        event.expected_before_s,
        event.expected_after_s,
        event.measured_s,
    )
    return replace(state, moves=(*state.moves, move)[-_KEPT:], moves_planned=number)


def record_end(state: ClusterState, chain: Chain, outcome: str) -> ClusterState:
    """The move that a chain was about to make does not come about."""
    return _with_last_open(state, chain, lambda move: replace(move, outcome=outcome))


def record_made(state: ClusterState, chain: Chain, epoch: int) -> ClusterState:
    """What was planned is used from this epoch on."""
    return _with_last_open(state, chain, lambda move: replace(move, made_epoch=epoch))


def _with_last_open(state: ClusterState, chain: Chain, change: Callable[[Move], Move]) -> ClusterState:
    is_open = [each.chain == chain.id and not each.outcome and not each.made_epoch for each in state.moves]
    if not any(is_open):
        return state
    last = max(index for index, each in enumerate(is_open) if each)
    moves = [change(each) if index == last else each for index, each in enumerate(state.moves)]
    return replace(state, moves=tuple(moves))


def standbys_after(
    state: ClusterState, chain: Chain, stages: tuple[Assignment, ...]
) -> tuple[Assignment, ...]:
    """What is held in reserve once a chain has these stages. A machine whose whole stage another takes over has its
    layers already: dropping them would mean to fetch them again, over the lines of those who serve."""
    kept = [each for each in chain.standbys if each not in stages]
    if chain.is_interrupted or chain.status != "ready":
        return tuple(kept)
    serving = {node for stage in stages for node in stage.members}
    wanted = {(stage.start, stage.stop) for stage in stages} - {(each.start, each.stop) for each in kept}
    for stage in chain.stages:
        node = state.nodes.get(stage.node)
        is_free = node is not None and node.status == "ready"
        if is_free and not stage.ranks and stage.node not in serving and (stage.start, stage.stop) in wanted:
            kept.append(stage)
    return tuple(kept)


def lives_after(chain: Chain, now_s: float) -> tuple[float, ...]:
    """How long its layouts were used, with the present one, which ends."""
    return (*chain.lived, max(0.0, now_s - chain.unrest.since_s))[-_KEPT_LIVES:]


def begin_moves_anew(state: ClusterState, now_s: float) -> ClusterState:
    """The clock is new: what was planned before it began counts against no budget."""
    before_s = now_s - state.placing.budget_s
    moves = tuple(replace(each, planned_s=min(each.planned_s, before_s)) for each in state.moves)
    return state if moves == state.moves else replace(state, moves=moves)


def _judge(state: ClusterState, event: happened.MoveJudged) -> ClusterState:
    moves = tuple(
        replace(each, outcome=event.outcome, measured_after_s=event.measured_s)
        if each.number == event.number and not each.outcome
        else each
        for each in state.moves
    )
    return state if moves == state.moves else replace(state, moves=moves)


def _keep_layout(state: ClusterState, event: happened.LayoutKept) -> ClusterState:
    known = state.models.get(event.model)
    if known is None or known.is_kept == event.is_kept:
        return state
    models = {**state.models, event.model: replace(known, is_kept=event.is_kept)}
    return forget_moves(replace(state, models=models))


MOVING: dict[type, Callable[[ClusterState, Any], ClusterState]] = {
    happened.MoveJudged: _judge,
    happened.LayoutKept: _keep_layout,
}
