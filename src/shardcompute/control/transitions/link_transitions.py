"""How events about links change the state, and what is to be done about links that do not hold.

A link that interrupts chains again and again without carrying one in between counts as closed (a circuit breaker):
plans go around it, and the end that could not reach the other tries now and then whether it is back. How often a link
broke is about what goes on now and begins anew with the coordinator; that it is closed is remembered, and probed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.actions import Action, ProbeLink
from shardcompute.control.drivers import loosen_drivers
from shardcompute.control.policy import HealthPolicy
from shardcompute.control.state import COORDINATOR, ClusterState, LinkBreaks, MeasuredLink, Node, hops
from shardcompute.control.transitions.state_updates import (
    forget_left,
    forget_moves,
    interrupt,
    is_on_probation,
    live_node,
    with_node,
)
from shardcompute.control.transitions.timing_transitions import without_doubts

_SAMPLES = 3
"""Links are measured more seldom than machines: two that agree are believed."""
_ANOTHER = 2.0
"""A link that is longer or thinner by this factor is not what it was."""


def which_link_fails(state: ClusterState, now_s: float) -> happened.Event | None:
    """A question of `planning`: a link that broke once too often."""
    for each in state.link_breaks:
        if each.count >= state.health.link_breaks:
            other = each.b if each.reporter == each.a else each.a
            return happened.LinkClosed(each.reporter, other, now_s)
    return None


def probe_commands(state: ClusterState, now_s: float) -> Iterator[Action]:
    """Closed links that are to be tried, each by the end that could not reach the other; the coordinator's driver is
    probed by its peer."""
    for link in _closed_links(state):
        if now_s < link.probe_at_s:
            continue
        prober, peer = (link.b, link.a) if link.closed_by == link.b else (link.a, link.b)
        if prober == state.driver:
            prober, peer = peer, prober
        if _is_answering(state, prober) and _is_answering(state, peer):
            yield ProbeLink(prober, peer)


def without_breaks(state: ClusterState, pairs: Iterable[tuple[str, str]]) -> ClusterState:
    """These links have carried a chain."""
    held = {frozenset(pair) for pair in pairs}
    left = tuple(each for each in state.link_breaks if {each.a, each.b} not in held)
    return state if left == state.link_breaks else replace(state, link_breaks=left)


def begin_links_anew(state: ClusterState, now_s: float) -> ClusterState:
    """The coordinator and its clock are new."""
    for link in _closed_links(state):
        state = _with_link(state, replace(link, probe_at_s=now_s))
    return replace(state, link_breaks=())


def _closed_links(state: ClusterState) -> list[MeasuredLink]:
    """By their ends. They are few among very many, of which only they are sorted."""
    closed = [link for row in state.links.values() for link in row.values() if not link.is_open]
    return sorted(closed, key=lambda link: (link.a, link.b))


def _with_link(state: ClusterState, link: MeasuredLink) -> ClusterState:
    row = {**state.links.get(link.a, {}), link.b: link}
    return replace(state, links={**state.links, link.a: row})


def _is_answering(state: ClusterState, id: str) -> bool:
    node = state.nodes.get(id)
    return id == state.driver or (node is not None and node.is_answering)


def _measure(state: ClusterState, event: happened.LinkMeasured) -> ClusterState:
    if event.a == event.b or event.rtt_s < 0 or event.bytes_per_s <= 0:
        return state
    a, b = sorted((event.a, event.b))
    if event.is_open:
        known = state.link(a, b)
        # What was measured on another way says nothing about this one.
        former = () if known is None or known.rung != event.rung else known.samples
        samples = (*former, (event.rtt_s, event.bytes_per_s))[-_SAMPLES:]
        rtt_s = statistics.median_low(rtt_s for rtt_s, _ in samples)
        bytes_per_s = statistics.median_high(rate for _, rate in samples)
        link = MeasuredLink(a, b, rtt_s, bytes_per_s, samples=samples, rung=event.rung, remark=event.remark)
        measured = _with_link(state, link)
        if known is None:
            return measured
        if not known.is_open:
            return forget_moves(measured)
        return forget_left(measured) if _is_another(known, link) else measured
    link = MeasuredLink(a, b, event.rtt_s, event.bytes_per_s, is_open=False, closed_by=event.a)
    return _close(state, link)


def _is_another(before: MeasuredLink, now: MeasuredLink) -> bool:
    rtts = sorted((before.rtt_s + 1e-4, now.rtt_s + 1e-4))
    rates = sorted((before.bytes_per_s, now.bytes_per_s))
    return max(rtts[1] / rtts[0], rates[1] / rates[0]) > _ANOTHER


def _close(state: ClusterState, link: MeasuredLink) -> ClusterState:
    reason = f"{link.a} and {link.b} cannot reach each other"
    return _interrupt_across(forget_moves(_with_link(state, link)), link.a, link.b, reason)


def _give_up(state: ClusterState, event: happened.LinkClosed) -> ClusterState:
    a, b = sorted((event.reporter, event.node))
    if a == b:
        return state
    known, policy = state.link(a, b), state.placing
    link = MeasuredLink(
        a,
        b,
        policy.default_rtt_s if known is None else known.rtt_s,
        policy.default_bytes_per_s if known is None else known.bytes_per_s,
        is_open=False,
        closed_by=event.reporter,
        probe_at_s=event.now_s + state.health.probe_after_s,
    )
    return _close(without_breaks(state, [(a, b)]), link)


def _note_probe(state: ClusterState, event: happened.LinkProbed) -> ClusterState:
    state = without_doubts(state, event.a, event.b)
    link = state.link(event.a, event.b)
    if link is None or link.is_open:
        return state
    return _with_link(state, replace(link, probe_at_s=event.now_s + state.health.probe_after_s))


def _break(state: ClusterState, event: happened.LinkBroken) -> ClusterState:
    node = live_node(state, event.node)
    if node is None:
        return state
    if event.reporter == event.node:
        return loosen_drivers(state, event.reporter, event.node)
    is_known = event.reporter in (COORDINATOR, state.driver)
    if not is_known and live_node(state, event.reporter) is None:
        return state
    if not is_on_probation(state, event.reporter):
        # Strangers throw nobody out: of what they say only that a link of theirs does not carry is believed.
        node = _accuse(node, event.reporter, state.health, event.now_s)
    state = with_node(loosen_drivers(state, event.reporter, event.node), node)
    reason = f"the link between {event.reporter} and {event.node} broke"
    interrupted = _interrupt_across(state, event.reporter, event.node, reason)
    return interrupted if interrupted is state else _count(interrupted, event.reporter, event.node)


def _accuse(node: Node, reporter: str, health: HealthPolicy, now_s: float) -> Node:
    """A control link that alone was reset leaves the machine as long as silence would to dial again: meanwhile its
    chains go on. Whoever cannot be reached by others either is most likely dead."""
    accusers = tuple(sorted({*node.accusers, reporter}))
    lease_until_s = node.lease_until_s
    if reporter == COORDINATOR:
        lease_until_s = max(lease_until_s, now_s + health.lost_after_s)
    if COORDINATOR in accusers and len(accusers) > 1:
        lease_until_s = min(lease_until_s, now_s + health.lost_after_reset_s)
    return replace(node, accusers=accusers, lease_until_s=lease_until_s)


def _count(state: ClusterState, reporter: str, node: str) -> ClusterState:
    """One more break; those of machines that may be dead say nothing about the link."""
    if not (_is_answering(state, reporter) and _is_answering(state, node)):
        return state
    a, b = sorted((reporter, node))
    count = next((each.count for each in state.link_breaks if (each.a, each.b) == (a, b)), 0)
    others = without_breaks(state, [(a, b)]).link_breaks
    return replace(state, link_breaks=(*others, LinkBreaks(a, b, count + 1, reporter)))


def _interrupt_across(state: ClusterState, a: str, b: str, reason: str) -> ClusterState:
    for chain in state.live_chains():
        if any({a, b} == set(hop) for hop in hops(state, chain)):
            state = interrupt(state, chain, reason)
    return state


LINKS: dict[type, Callable[[ClusterState, Any], ClusterState]] = {
    happened.LinkMeasured: _measure,
    happened.LinkBroken: _break,
    happened.LinkClosed: _give_up,
    happened.LinkProbed: _note_probe,
}
