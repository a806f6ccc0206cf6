"""Canaries of a swarm: silent as long as answers are what they were, and loud once a stage computes otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.node.cluster.canaries.record import open_notes
from support.swarm.lab import SPREAD, swarm

from .test_audits import skip_a_layer

NEVER_S = 1e9
"""By themselves they would come in thirty years: a test sends its own."""


def test_a_stage_that_drifts_raises_the_alert(
    tmp_path: Path, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with swarm(
        tmp_path, tiny, layers=(40, 40, 40), stages=3, placing=SPREAD, canaries_every_s=NEVER_S
    ) as lab:
        canaries = lab.cluster.canaries
        assert canaries is not None
        first = [canaries.send(number=number) for number in range(3)]
        assert [each and each.agreed for each in first] == [None] * 3, "nothing is known at first"
        again = [canaries.send(number=number) for number in range(3)]
        assert [each and each.agreed for each in again] == [1.0] * 3
        assert canaries.warnings() == ()
        skip_a_layer(lab.stage(1), tiny)
        caplog.clear()
        readings = [canaries.send(number=number) for number in range(3)]
        assert all(each is not None and each.agreed is not None and each.agreed < 1.0 for each in readings)
        [warning] = canaries.warnings()
        assert "3 of the last 6 canaries differ" in warning
        assert warning in caplog.messages
        drifts = canaries.notes.machines
        assert set(drifts) == set(lab.chain().members)
        assert all(drift.differed == 3 and drift.level > 0.1 for drift in drifts.values())
        # It outlives the process, and is for its owner's eyes.
        path = lab.options.folder / "canaries.json"
        assert open_notes(path) == canaries.notes
        assert path.stat().st_mode & 0o077 == 0
        # To workers it was work like any other: nothing is kept of it, nobody asked for a receipt or for scores.
        lab.wait_quiet()
