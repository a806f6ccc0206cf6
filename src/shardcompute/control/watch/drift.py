"""Drift: machines and lines that have clearly become slower, or faster, than is believed of them.

Steps are measured all the time (`transitions.timing_transitions`). Where the newest estimates of a stage agree, beyond
their own noise, that it is another than placement believes, that is believed from now on; whether a move pays for
it is decided by `moves`. Lines are measured together by every step and told apart only by probes, which are asked for
once a whole ring has drifted.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardcompute.control.actions import Action, ProbeLink
from shardcompute.control.events import Event, NodeMeasured
from shardcompute.control.state import ClusterState, LayerTime, Node, StageTime

_DRIFT = 0.2
"""By so much of what is believed a stage's steps must differ from it."""
_PROBES = 2
"""So often a doubtful link is measured: as many have to agree to be believed."""


def which_stage_has_drifted(state: ClusterState, now_s: float) -> Event | None:
    """A question of `planning`."""
    for id in sorted(state.nodes):
        node = state.nodes[id]
        if node.is_answering:
            for time in node.stage_times:
                event = _drift_of(node, time)
                if event is not None:
                    return event
    return None


def _drift_of(node: Node, time: StageTime) -> NodeMeasured | None:
    known = next((each for each in node.layer_times if each.model == time.model), None)
    believed_s = _believed_s(node, time, known)
    prompt_s = None if known is None or time.is_group else known.prefill_s
    decode_s = None if time.decode is None else time.decode.shift_from(believed_s, _DRIFT)
    prefill_s = None
    if time.prefill is not None and prompt_s is not None:
        prefill_s = time.prefill.shift_from(prompt_s, _DRIFT)
    if decode_s is None and prefill_s is None:
        return None
    layer_s = decode_s or believed_s
    return NodeMeasured(
        node=node.id,
        incarnation=node.incarnation,
        model=time.model,
        layer_s=layer_s,
        shape=time.shape,
        batch_layer_s=layer_s * time.batch_factor or None,
        prefill_layer_s=prefill_s,
        is_served=True,
        measured_at_s=time.measured_at_s,
        chain=time.chain if time.is_group else "",
    )


def _believed_s(node: Node, time: StageTime, known: LayerTime | None) -> float:
    if not time.is_group:
        is_same = known is not None and known.shape == time.shape
        return known.seconds if is_same and known is not None else time.loaded_s
    groups = [each for each in node.group_times if each.model == time.model]
    return groups[-1].seconds if groups else time.loaded_s


def probes_of_doubtful_links(state: ClusterState) -> Iterator[Action]:
    """Commands: each link by one of its ends; the coordinator's driver is probed by its peer."""
    for chain in state.live_chains():
        if chain.ring is None or chain.status != "ready" or chain.ring.epoch != chain.epoch:
            continue
        for a, b in chain.ring.doubtful:
            prober, peer = (b, a) if a == state.driver else (a, b)
            ends = [state.nodes.get(end) for end in (prober, peer) if end != state.driver]
            if all(end is not None and end.is_answering for end in ends):
                yield ProbeLink(prober, peer, _PROBES)
