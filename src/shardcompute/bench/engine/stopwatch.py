"""Stopwatch of an arm: by the clock, and by what its process had of the processors."""

from __future__ import annotations

import time
from typing import NamedTuple


class Spent(NamedTuple):
    """Seconds. On a machine that others use, those of the processor are steadier; with several threads they also count
    how long those waited for each other."""

    clock_s: float
    processor_s: float


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._began = Spent(time.perf_counter(), time.process_time())

    def read(self) -> Spent:
        return Spent(time.perf_counter() - self._began.clock_s, time.process_time() - self._began.processor_s)
