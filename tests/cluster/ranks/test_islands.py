"""Machines that find themselves near each other compute together, those that are far one after the other: by what they
measure of a network that delays their frames, without being told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardcompute.control import Placement, PlacementPolicy, place
from shardcompute.control.placement.parallelism import AUTO, Parallelism
from shardcompute.control.placement.request import placement_request
from shardcompute.node.rpc.link_probe import probe_link
from support.models.requests import greedy
from support.swarm.lab import Alone, LabWorker, swarm

QUICK = PlacementPolicy(latency_weight=0.9, machine_price=0.0, least_lifetime_s=0.0)
SLOW_LAYER_S = 0.02
TWO = (40, 40)
"""With room for what is served and what it becomes."""


@pytest.mark.parametrize(("rtt_s", "shape"), [(1e-4, [2]), (5e-3, [1, 1])], ids=["0.1 ms", "5 ms"])
def test_near_machines_are_ranks_and_far_ones_are_stages(
    tmp_path: Path, tiny: Path, alone: Alone, rtt_s: float, shape: list[int]
) -> None:
    distances = {"has_distances": True, "rtt_s": rtt_s, "home_rtt_s": rtt_s, "layer_s": SLOW_LAYER_S}
    with swarm(tmp_path, tiny, layers=TWO, placing=QUICK, parallel=AUTO, **distances) as lab:
        ends = sorted(worker.node for worker in lab.workers)
        lab.wait_until(lambda: lab.state.link(*ends) is not None, "the link between them is measured")
        measured = lab.state.link(*ends)
        assert measured is not None
        assert measured.rtt_s == pytest.approx(rtt_s), "frames took so long, and nobody else told"
        assert _probe_s(*lab.workers) >= rtt_s, "by any clock"
        request = placement_request(lab.state, lab.state.models[lab.model].model, 0.0, chain=lab.chain())
        planned = place(request)
        assert isinstance(planned, Placement)
        assert [len(stage.members) for stage in planned.assignments] == shape
        lab.wait_until(
            lambda: [len(stage.members) for stage in lab.chain().stages] == shape and lab.is_serving(),
            lab.describe,
        )
        assert all(stage.exchange == "gather" for stage in lab.chain().stages)
        wanted = greedy([5, 6, 7, 8], 12)
        assert lab.ask(wanted) == alone.answer(wanted)


def _probe_s(near: LabWorker, far: LabWorker) -> float:
    began_s = time.monotonic()
    probe_link(lambda: near._endpoint.dial(far.url, "probe", far.node))
    return time.monotonic() - began_s


def test_ranks_that_were_asked_for_are_formed_wherever_machines_are(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    asked = Parallelism(tp=2, pp=2)
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), parallel=asked, rtt_s=5e-3) as lab:
        assert [len(stage.members) for stage in lab.chain().stages] == [2, 2]
        request = greedy([5, 6, 7, 8], 12)
        assert lab.ask(request) == alone.answer(request)
