"""Layouts and moves in words, for events, logs and whoever looks at a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.control.placement.cost_model import Score
from shardcompute.control.placement.replacement import Replacement
from shardcompute.control.state import Assignment, Chain, ClusterState, Move, loaded_fraction
from shardcompute.core.units import format_bytes, format_rate, format_seconds, name_layers


def name_of(state: ClusterState, node: str) -> str:
    return state.nodes[node].name if node in state.nodes else node


def layout_in_words(state: ClusterState, stages: Sequence[Assignment]) -> str:
    """Such as "desk (0–13) → lap + pi (14–29)", where lap and pi compute their layers together."""
    return " → ".join(
        f"{members_in_words(state, stage)} ({stage.start}–{stage.stop - 1})" for stage in stages
    )


def members_in_words(state: ClusterState, stage: Assignment) -> str:
    return " + ".join(name_of(state, node) for node in stage.members)


def change_in_words(state: ClusterState, before: Sequence[Assignment], after: Sequence[Assignment]) -> str:
    return f"from {layout_in_words(state, before)} to {layout_in_words(state, after)}"


def move_in_words(
    state: ClusterState, chain: Chain, move: Replacement, why: str, now: Score, then: Score
) -> str:
    """Why a serving chain moves, from what to what, what that is to gain and what it costs."""
    return (
        f"{why}: {change_in_words(state, chain.stages, move.stages)}, "
        f"for {format_rate(then.one_stream)} instead of {format_rate(now.one_stream)} in one stream and "
        f"{format_rate(then.many_streams)} instead of {format_rate(now.many_streams)} in many; "
        f"{format_bytes(move.moved_bytes)} to fetch, about {format_seconds(move.move_s)}"
    )


def outcome_in_words(move: Move, measured_s: float) -> str:
    """What came of a move whose new layout was measured, beside what was expected of it."""
    told = f"a step takes {format_seconds(measured_s)}"
    expected = move.expected_before_s / move.expected_after_s if move.expected_after_s else 0.0
    if not move.measured_before_s:
        return f"{told}; nobody had asked for anything before"
    told += f" instead of {format_seconds(move.measured_before_s)}"
    times = move.measured_before_s / measured_s
    return f"{told}: {times:.1f} times as fast" + (f", {expected:.1f} were expected" if expected else "")


def repair_in_words(state: ClusterState, chain: Chain, repair: Replacement) -> str:
    """What becomes of a chain that was interrupted, and why."""
    why = f"{repair.how} because {chain.reason}" if chain.reason else repair.how
    if repair.stages == chain.stages:
        return why
    return f"{why}: {change_in_words(state, chain.stages, repair.stages)}"


def loading_in_words(state: ClusterState, chain: Chain, missing: Sequence[Assignment]) -> str:
    """What a chain waits for, such as "lap has 41 % of layers 14–29"."""
    return ", ".join(
        f"{members_in_words(state, each)} has {loaded_fraction(state, chain, each):.0%} "
        f"of {name_layers(each.start, each.stop)}"
        for each in missing
    )


def failures_in_words(state: ClusterState, model: str, now_s: float) -> str:
    """Who is left alone with a model, and why; empty where nobody is."""
    return "; ".join(
        f"{node.name} could not load it: {refusal.reason}"
        for node in (state.nodes[id] for id in sorted(state.nodes))
        for refusal in node.refusals
        if node.is_live and refusal.model == model and now_s < refusal.until_s
    )


def standbys_in_words(state: ClusterState, chain: Chain, standbys: Sequence[Assignment]) -> str:
    """Who takes up layers to hold ready, and who lets go of them."""
    is_moving = chain.target is not None
    told = [
        f"{members_in_words(state, each)} loads layers {each.start}–{each.stop - 1} "
        + ("for the move" if is_moving else "to stand by")
        for each in standbys
        if each not in chain.standbys
    ]
    told += [
        f"{members_in_words(state, each)} lets go of layers {each.start}–{each.stop - 1}"
        for each in chain.standbys
        if each not in standbys
    ]
    return ", ".join(told)
