"""How times of steps change the state: estimates of stages on their nodes, and of the ring on its chain.

They say what is measured, not yet what is believed: that changes by decisions (`drift`), and for lines by measuring
them one by one once the ring as a whole has drifted. Nothing of it outlives the coordinator's process.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import Any

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.state import Chain, ClusterState, RingTime, StageTime
from shardcompute.control.transitions.state_updates import live_node, with_chain, with_node
from shardcompute.control.watch.estimates import observe

_RING_DRIFT = 0.5
_RING_DRIFT_S = 0.001
"""By so much of their time, and so many seconds, the lines of a ring must differ from what they took, to be doubted."""
_SILENT_S = 20.0
"""A driver that has told nothing for so long has nobody to answer."""


def _time_stage(state: ClusterState, event: happened.StageTimed) -> ClusterState:
    node = live_node(state, event.node, event.incarnation)
    place = (event.chain, event.start, event.stop)
    if node is None or not 0 < event.loaded_s < inf:
        return state
    if all((held.chain, held.start, held.stop) != place for held in node.shards):
        return state
    others = [each for each in node.stage_times if (each.chain, each.start, each.stop) != place]
    known = next((each for each in node.stage_times if each not in others), None)
    if known is None or known.loaded_s != event.loaded_s:  # the same layers, loaded anew
        known = StageTime(event.chain, event.model, event.start, event.stop, event.loaded_s)
    batch_factor = known.batch_factor
    if event.layer_s and event.batch_layer_s:
        batch_factor = event.batch_layer_s / event.layer_s
    timed = replace(
        known,
        decode=known.decode if event.layer_s is None else observe(known.decode, event.layer_s, event.now_s),
        prefill=known.prefill
        if event.prefill_layer_s is None
        else observe(known.prefill, event.prefill_layer_s, event.now_s),
        shape=event.shape,
        batch_factor=batch_factor,
        is_group=event.is_group,
        measured_at_s=event.measured_at_s,
    )
    held = {(each.chain, each.start, each.stop) for each in node.shards}
    kept = [each for each in others if (each.chain, each.start, each.stop) in held]
    return with_node(state, replace(node, stage_times=(*kept, timed)))


def _time_ring(state: ClusterState, event: happened.RingTimed) -> ClusterState:
    chain = state.chains.get(event.chain)
    if chain is None or not chain.is_live or chain.is_interrupted or event.epoch != chain.epoch:
        return state
    known = chain.ring if chain.ring is not None and chain.ring.epoch == event.epoch else None
    if known is not None and known.driver != event.driver:
        if not _takes_over(known, event):
            return state
        known = None
    ring = known or RingTime(event.epoch, event.driver)
    ring = replace(
        ring,
        step=observe(ring.step, event.step_s, event.now_s),
        wire=observe(ring.wire, event.wire_s, event.now_s),
    )
    return with_chain(state, replace(chain, ring=_doubted(state, chain, ring, event.now_s)))


def _takes_over(known: RingTime, event: happened.RingTimed) -> bool:
    """Each driver has a ring of its own, and they are not to be mixed: the chain's is that of its own driver, or of
    another where that one has told nothing of late."""
    last_s = 0.0 if known.step is None else known.step.at_s
    return not event.driver or event.now_s - last_s > _SILENT_S


def _doubted(state: ClusterState, chain: Chain, ring: RingTime, now_s: float) -> RingTime:
    """With the links that are to be measured anew, where all of them together have drifted."""
    if ring.wire is None or not ring.wire.is_settled or chain.target is not None:
        return ring  # where weights and sessions travel, lines are slower for that
    if not ring.usual_wire_s:
        return replace(ring, usual_wire_s=ring.wire.level)
    shifted_s = ring.wire.shift_from(ring.usual_wire_s, _RING_DRIFT)
    if shifted_s is None or abs(shifted_s - ring.usual_wire_s) < _RING_DRIFT_S:
        return ring
    if ring.doubtful or (ring.doubted_s and now_s - ring.doubted_s < state.placing.doubt_every_s):
        return ring
    home = ring.driver or chain.driver_host or state.driver
    return replace(ring, usual_wire_s=shifted_s, doubted_s=now_s, doubtful=_links_of(chain, home))


def _links_of(chain: Chain, home: str) -> tuple[tuple[str, str], ...]:
    """Those on which rows go round from a driver, each once."""
    pairs = (tuple(sorted(pair)) for pair in pairwise((home, *chain.nodes, home)) if pair[0] != pair[1])
    return tuple((a, b) for a, b in dict.fromkeys(pairs))


def without_doubts(state: ClusterState, a: str, b: str) -> ClusterState:
    """This link has been measured anew, or could not be."""
    pair = (min(a, b), max(a, b))
    for chain in state.live_chains():
        if chain.ring is not None and pair in chain.ring.doubtful:
            left = tuple(each for each in chain.ring.doubtful if each != pair)
            state = with_chain(state, replace(chain, ring=replace(chain.ring, doubtful=left)))
    return state


TIMES: dict[type, Callable[[ClusterState, Any], ClusterState]] = {
    happened.StageTimed: _time_stage,
    happened.RingTimed: _time_ring,
}
