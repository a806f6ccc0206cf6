"""Chains that move amid streams, with the KV of their sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.swarm.lab import SPREAD, STILL, Alone, swarm
from support.swarm.streams import assert_undisturbed, start_streams


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("has_standby", [True, False], ids=["to a standby", "to the others"])
def test_a_machine_that_leaves_gives_its_sessions_along(
    tmp_path: Path, tiny: Path, alone: Alone, stage: int, has_standby: bool
) -> None:
    layers, placing = ((2, 2, 2, 2), STILL) if has_standby else ((45, 45, 45), SPREAD)
    with swarm(tmp_path, tiny, layers=layers, stages=3, standbys=int(has_standby), placing=placing) as lab:
        talks = start_streams(lab, alone, 8)
        before = len(lab.activations)
        lab.leave(lab.stage(stage))
        lab.wait_until(lambda: len(lab.activations) > before, lab.describe)
        resumed = lab.activations[-1].resumption
        assert resumed is not None
        assert not resumed.has_new_first
        assert resumed.lengths
        assert_undisturbed(lab, alone, talks)
