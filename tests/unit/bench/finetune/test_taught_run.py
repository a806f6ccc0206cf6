"""What a benchmark reads of a run of `finetune`, and what it does with one that fails or takes too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.bench.finetune.taught_run import read_taught_run, run_finetune
from shardcompute.core.errors import BackendError

SAID = """
step 1/3: loss 4.0000, 100 tok/s
step 2/3: loss 2.5000, held out 2.7500, 300 tok/s
step 3/3: loss 1.2500, 200 tok/s
1.0 MiB (1048576 bytes) went between stages; workers were idle 12%, 40% of the time
"""


def test_losses_speeds_bytes_and_idle_shares_are_read_in_order() -> None:
    run = read_taught_run(SAID, 0, "swarm", 9.0)
    assert run.losses == (4.0, 2.5, 1.25)
    assert run.speeds == (100.0, 300.0, 200.0)
    assert run.wire_bytes == 1048576
    assert run.idle_shares == (0.12, 0.4)
    assert run.elapsed_s == 9.0


def test_the_speed_leaves_out_the_first_steps_unless_there_are_no_others() -> None:
    run = read_taught_run(SAID, 0, "swarm")
    assert run.median_speed(1) == 250.0
    assert run.median_speed(3) == 200.0


def test_one_process_sends_nothing() -> None:
    assert read_taught_run("step 1/1: loss 4.0, 100 tok/s", 0, "alone").wire_bytes is None


@pytest.mark.parametrize(("said", "code"), [(SAID, 3), ("error: no such model", 2), ("", 0)])
def test_a_run_that_failed_or_told_of_no_step_is_no_result(said: str, code: int) -> None:
    with pytest.raises(BackendError, match=f"the run to swarm failed with code {code}"):
        read_taught_run(said, code, "swarm")


def test_a_run_that_takes_too_long_is_ended_and_said(tmp_path: Path) -> None:
    def wait(command: object) -> list[str]:
        return ["sleep", "60"]

    with pytest.raises(BackendError, match=r"took more than 0\.2 s"):
        run_finetune("any", tmp_path, tmp_path / "out", (), steps=1, longest=8, timeout_s=0.2, within=wait)
