"""A stage that becomes slow while it serves is relieved by another machine, and answers stay what they were."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

from shardcompute.control import PlacementPolicy
from shardcompute.node.telemetry import ring_pace
from shardcompute.node.worker.stages import service_pace
from shardcompute.runtime.stage import StageRuntime
from support.models.requests import mixture
from support.swarm.lab import Alone, LabWorker, swarm

CALM = PlacementPolicy(latency_weight=1.0, tensor_min_gain=1e9, least_lifetime_s=0.0)
STEP_S = 0.004
"""What a stage takes besides computing, which for a model this small is next to nothing: machines are equal by that."""


def test_a_slowed_stage_is_relieved_and_answers_stay_the_same(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    slowed: set[LabWorker] = set()
    finish = StageRuntime.finish

    def take_time(runtime: StageRuntime, pending: Any) -> Any:
        is_slow = any(runtime in worker.stages.shards().values() for worker in slowed)
        time.sleep(6 * STEP_S if is_slow else STEP_S)
        return finish(runtime, pending)

    [request] = mixture(alone, 1, 100)
    expected = alone.answer(request)
    with (
        swarm(tmp_path, tiny, layers=(4, 4, 4), stages=2, standbys=1, placing=CALM, layer_s=STEP_S) as lab,
        mock.patch.object(StageRuntime, "finish", take_time),
        mock.patch.object(service_pace, "LEAST_WINDOW_S", 0.0),
        mock.patch.object(ring_pace, "LEAST_WINDOW_S", 0.0),
    ):
        for _ in range(2):
            assert lab.ask(request) == expected
        slow = lab.stage(1)
        slowed.add(slow)
        for _ in range(12):
            assert lab.ask(request) == expected
            if slow.node not in lab.chain().members:
                break
        assert slow.node not in lab.chain().members, lab.describe()
        for _ in range(8):
            assert lab.ask(request) == expected
            if lab.state.moves[-1].outcome:
                break
        move = lab.state.moves[-1]
        assert move.outcome.startswith("a step takes "), move
        assert move.measured_after_s < move.measured_before_s
