"""KV on the way: how long a chain that moves for gain waits for its sessions to travel, before it does without. Pure.

Sessions go on while they are copied, at the pace of the layout that is to be left. Computing them again makes everybody
wait, but for a known time. So a copy may take as long as waiting costs no more than that: on a LAN that is always, over
the thin line that is the reason for a move it is never. A machine that is to be emptied loses nothing by waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from shardcompute.control.state import Assignment, Chain, ClusterState, Move

_LEAST_S = 5.0
"""Worth waiting whatever the sums say: they are estimates."""
_BATCH_ROWS = 8


@dataclass(frozen=True, slots=True)
class KvTravel:
    """Estimates for one move."""

    copy_s: float
    """How long sessions are on the way, with the lines to themselves."""
    replay_s: float
    """How long computing them again takes."""
    limit_s: float
    """So long a copy is worth waiting for."""

    @property
    def pays(self) -> bool:
        return self.copy_s <= self.limit_s

    @property
    def words(self) -> str:
        return f"they would travel for {self.copy_s:.0f} s and are computed again in {self.replay_s:.0f} s"


def estimate_travel(state: ClusterState, chain: Chain, stages: Sequence[Assignment]) -> KvTravel:
    """Of a chain that serves to these stages."""
    tokens = _tokens_held(state, chain)
    replay_s = tokens * sum(_row_s(state, chain, stage) for stage in stages if stage not in chain.stages)
    copy_s = max(_copies_s(state, chain, stages, tokens), default=0.0)
    lost = _lost_part(state, chain)
    limit_s = inf if lost <= 0 else max(_LEAST_S, replay_s / lost)
    return KvTravel(copy_s, replay_s, limit_s)


def _tokens_held(state: ClusterState, chain: Chain) -> float:
    """Of all sessions, by what the fullest of its stages reports."""
    layer_bytes = state.models[chain.model].model.kv_bytes_per_token_and_layer
    held = [
        state.nodes[stage.node].kv_used_bytes / max(1, layer_bytes * (stage.stop - stage.start))
        for stage in chain.stages
        if stage.node in state.nodes
    ]
    return max(held, default=0.0)


def _copies_s(
    state: ClusterState, chain: Chain, stages: Sequence[Assignment], tokens: float
) -> Iterator[float]:
    """For each line on which sessions go."""
    layer_bytes = state.models[chain.model].model.kv_bytes_per_token_and_layer
    for new in stages:
        for old in chain.stages:
            layers = min(new.stop, old.stop) - max(new.start, old.start)
            if new in chain.stages or layers <= 0 or new.node == old.node:
                continue
            link = state.link(*sorted((old.node, new.node)))
            rate = state.placing.default_bytes_per_s if link is None else link.bytes_per_s
            yield tokens * layer_bytes * layers / max(rate, 1.0)


def _row_s(state: ClusterState, chain: Chain, stage: Assignment) -> float:
    """Of a prompt, through a stage."""
    node = state.nodes.get(stage.node)
    known = None if node is None else next((t for t in node.layer_times if t.model == chain.model), None)
    if known is None:
        return 0.0
    layer_s = known.prefill_s or (known.batch_s / _BATCH_ROWS if known.batch_s else known.seconds)
    return layer_s * (stage.stop - stage.start)


def _lost_part(state: ClusterState, chain: Chain) -> float:
    """Of the throughput, as long as the chain has not moved; 0 where it does not move for gain."""
    planned: list[Move] = [move for move in state.moves if move.chain == chain.id and not move.outcome]
    if not planned or planned[-1].is_urgent or chain.target is None:
        return 0.0
    before_s, after_s = planned[-1].expected_before_s, planned[-1].expected_after_s
    return 1 - after_s / before_s if 0 < after_s < before_s else 0.0
