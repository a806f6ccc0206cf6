"""Slowdown of a process of ours: stopped for a part of every few milliseconds, by a process of its own.

Periods are short against steps, so that every step is slower, as on a machine that throttles or that others use, and
not one step in ten by very much. Python threads beside busy ones do not wake that exactly, therefore another process:

    python -m shardcompute.bench.drift.slowdown PID TIMES NOISE SEED

ends with its standard input, and leaves the other one running.
"""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import exp

import psutil

_PERIOD_S = 0.02
_PACE_S = 1.0
"""So long one draw of the noise lasts."""
_END_S = 5.0


@contextmanager
def slowed_down(pid: int, times: float, noise: float = 0.0, seed: int = 0) -> Iterator[None]:
    """A process that needs `times` as long for everything, off by `noise` from one second to the next."""
    command = [sys.executable, "-m", __name__, str(pid), str(times), str(noise), str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).resume()


def factors(times: float, noise: float, seed: int) -> Iterator[float]:
    """How much slower one second after the other is; never faster than the machine."""
    draw = random.Random(seed)
    while True:
        yield max(1.0, times * exp(draw.gauss(0.0, noise)))


def hold_up(pid: int, times: float, noise: float, seed: int) -> None:
    """Until standard input ends, or the process does."""
    process, drawn = psutil.Process(pid), factors(times, noise, seed)
    until_s, run_s = 0.0, _PERIOD_S
    try:
        while process.is_running():
            if time.monotonic() >= until_s:
                until_s, run_s = time.monotonic() + _PACE_S, _PERIOD_S / next(drawn)
            process.suspend()
            is_over = _wait(_PERIOD_S - run_s)
            process.resume()
            if is_over or _wait(run_s):
                return
    except psutil.NoSuchProcess:
        return
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _wait(seconds: float) -> bool:
    """True when standard input has ended."""
    readable, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
    return bool(readable)


if __name__ == "__main__":
    hold_up(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
