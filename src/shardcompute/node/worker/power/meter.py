"""Power meter of a worker: what its machine draws while layers are computed, and while nothing is.

Windows of some seconds are told apart by how much of them steps took. What lies between counts for neither: nobody
knows how much of it was ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardcompute.backends.devices import ComputeDevice
from shardcompute.node.worker.power.counters import EnergyCounter, find_counter

log = logging.getLogger(__name__)
_WINDOW_S = 5.0
_BUSY_SHARE = 0.5
_IDLE_SHARE = 0.02
_NEWEST = 0.25
"""What the newest window counts beside all before it."""


class PowerMeter:
    """`sharers`: so many workers of this machine share what is counted, each of which answers for its part."""

    def __init__(self, counter: EnergyCounter | None, sharers: int = 1) -> None:
        self._counter = counter
        self._sharers = max(1, sharers)
        self._began: tuple[float, float, float] | None = None
        self.busy_watts = 0.0
        """0: not known, or not known yet."""
        self.idle_watts = 0.0

    def look(self, now_s: float, computed_s: float) -> None:
        """Now, when so many seconds in all have been computed. Cheap unless a window ends."""
        counter, began = self._counter, self._began
        if counter is None or (began is not None and now_s - began[0] < _WINDOW_S):
            return
        try:
            joules = counter.joules()
        except (OSError, ValueError) as error:
            log.warning("the machine's energy counter cannot be read any more: %s", error)
            self._counter = None
            return
        self._began = now_s, computed_s, joules
        if began is None:
            return
        span_s = now_s - began[0]
        self._note((computed_s - began[1]) / span_s, (joules - began[2]) / span_s / self._sharers)

    def _note(self, busy_share: float, watts: float) -> None:
        if busy_share >= _BUSY_SHARE:
            self.busy_watts = _mixed(self.busy_watts, watts)
        elif busy_share <= _IDLE_SHARE:
            self.idle_watts = _mixed(self.idle_watts, watts)


def _mixed(before: float, newest: float) -> float:
    return before + _NEWEST * (newest - before) if before else newest


def open_meter(
    device: ComputeDevice, sharers: int, find: Callable[[ComputeDevice], EnergyCounter | None] = find_counter
) -> PowerMeter:
    """A card is one worker's alone; processors are shared."""
    counter = find(device)
    if counter is not None:
        log.info("what %s draws is measured by %s", device.name, counter.source)
    return PowerMeter(counter, sharers if device.name == "cpu" else 1)
