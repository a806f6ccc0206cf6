"""One run of `shardcompute finetune` as a benchmark takes it: the command line, and what the run has said.

Benchmarks teach as users do, by a command of its own process; speeds, losses and bytes are those that it tells.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.core.errors import BackendError

_STEP = re.compile(r"step \d+/\d+: loss ([\d.]+)[^,]*(?:, held out [\d.]+)?, ([\d.]+) tok/s")
_BYTES = re.compile(r"\((\d+) bytes\) went between")
_IDLE = re.compile(r"workers were idle (\S.*?) of the time")
_SHARE = re.compile(r"(\d+)%")
_SAID = 500
"""Characters of a failed run's last words that are shown."""


@dataclass(frozen=True, slots=True)
class TaughtRun:
    """What a run has said of itself; `losses` and `speeds` are of its steps, in order."""

    losses: tuple[float, ...]
    speeds: tuple[float, ...]
    wire_bytes: int | None
    """Between the stages of a swarm; None where the run was in one process."""
    idle_shares: tuple[float, ...]
    elapsed_s: float = 0.0

    def median_speed(self, skipped: int) -> float:
        """Tokens a second, without the first steps unless there are no others."""
        return statistics.median(self.speeds[skipped:] or self.speeds)


def run_finetune(
    model_path: str,
    data: Path,
    out: Path,
    options: Sequence[object],
    *,
    steps: int,
    longest: int,
    timeout_s: float,
    within: Callable[[Sequence[str]], list[str]] = list,
) -> TaughtRun:
    """Teach in a process of its own, which `within` may put elsewhere. BackendError where it fails or takes long."""
    command = [
        sys.executable, "-m", "shardcompute", "finetune", model_path, data, "--out", out, "--steps", steps,
        "--batch", 8, "--max-length", longest, "--no-samples", *options,
    ]  # fmt: skip
    started = time.monotonic()
    try:
        done = subprocess.run(
            within([str(part) for part in command]),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"the run to {out.name} took more than {timeout_s:g} s",
            hint="teach fewer steps, or a smaller model",
        ) from error
    return read_taught_run(done.stderr, done.returncode, out.name, time.monotonic() - started)


def read_taught_run(said: str, code: int, name: str, elapsed_s: float = 0.0) -> TaughtRun:
    """What a run has said. BackendError where it has failed, or told of no step."""
    steps: Sequence[tuple[str, str]] = _STEP.findall(said)
    if code or not steps:
        raise BackendError(f"the run to {name} failed with code {code}: {said[-_SAID:]}")
    size, idle = _BYTES.search(said), _IDLE.search(said)
    return TaughtRun(
        tuple(float(loss) for loss, _ in steps),
        tuple(float(speed) for _, speed in steps),
        None if size is None else int(size[1]),
        () if idle is None else tuple(float(each) / 100 for each in _SHARE.findall(idle[1])),
        elapsed_s,
    )
