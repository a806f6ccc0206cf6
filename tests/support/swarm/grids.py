"""Chains whose stages have tensor ranks, in a swarm inside a test: the layout is told, not searched for."""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.control.events import ChainReshaped
from shardcompute.control.state import Assignment, RankSeat
from shardcompute.models.tensor_share import Exchange
from support.swarm.lab import LabSwarm, LabWorker

Grid = Sequence[Sequence[int]]
"""For each stage the weights of its ranks; one weight: a machine alone."""


def stages_of(
    workers: Sequence[LabWorker], grid: Grid, layers: int, exchange: Exchange = "gather"
) -> tuple[Assignment, ...]:
    """Layers in even parts, on the workers in their order."""
    edges = [round(index * layers / len(grid)) for index in range(len(grid) + 1)]
    stages, left = [], list(workers)
    for index, weights in enumerate(grid):
        members, left = left[: len(weights)], left[len(weights) :]
        seats = tuple(RankSeat(worker.node, weight) for worker, weight in zip(members, weights, strict=True))
        ranks = seats if len(seats) > 1 else ()
        stages.append(Assignment(members[0].node, edges[index], edges[index + 1], ranks, exchange))
    return tuple(stages)


def reshape(lab: LabSwarm, grid: Grid, exchange: Exchange = "gather") -> tuple[Assignment, ...]:
    """Have the first chain computed so, and wait until it is."""
    layers = lab.state.models[lab.model].model.layer_count
    stages = stages_of(lab.workers, grid, layers, exchange)
    chain = lab.chain()
    if chain.stages != stages:
        lab.cluster.coordinator.post(ChainReshaped(chain.id, chain.epoch + 1, stages, "a test"))
        lab.wait_until(lambda: lab.chain().stages == stages, lab.describe)
    lab.wait_serving()
    assert lab.chain().stages == stages
    return stages
