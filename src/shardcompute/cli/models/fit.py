"""Fit of a model on this machine: whether what is free now is enough, how much is missing, how fast it would be.

Speed is what a short probe of the processor says, kept for a week; a GPU's only if a worker has measured it here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.backends.devices import ComputeDevice, find_devices, offered_bytes
from shardcompute.backends.footprint import holding_of, process_bytes
from shardcompute.backends.processor import default_threads
from shardcompute.control.sizes import sizes_of
from shardcompute.control.state import Model
from shardcompute.core.units import format_bytes, format_rate
from shardcompute.node.worker.backend_trial import BOOK
from shardcompute.node.worker.speed_book import DeviceKey, SpeedBook
from shardcompute.node.worker.speed_probe import BackendSpeed, probe_backend

_PROBE_LASTS_S = 7 * 86_400.0

Measure = Callable[[ComputeDevice, Path], BackendSpeed | None]


@dataclass(frozen=True, slots=True)
class Fit:
    """Of a whole model on one device: what it takes there, with the process, of what may be used now."""

    device: str
    needed_bytes: int
    free_bytes: int
    tokens_per_s: float | None = None
    """For one stream; None where it is not known."""

    @property
    def missing_bytes(self) -> int:
        return max(0, self.needed_bytes - self.free_bytes)

    @property
    def words(self) -> str:
        takes = f"takes {format_bytes(self.needed_bytes)} of {format_bytes(self.free_bytes)} ({self.device})"
        if self.missing_bytes:
            return f"needs {format_bytes(self.missing_bytes)} more: {takes}"
        rate = "" if self.tokens_per_s is None else f"; expect {format_rate(self.tokens_per_s)}"
        return f"fits now: {takes}{rate}"


def measured_speed(device: ComputeDevice, folder: Path) -> BackendSpeed | None:
    """As remembered in this folder; a CPU is probed where nothing is, which takes a second."""
    threads, now_s = default_threads(), time.time()
    book, key = SpeedBook(folder / BOOK), DeviceKey(device.label, device.backend, device.name, threads)
    known = book.probed(key, since_s=now_s - _PROBE_LASTS_S)
    if known is not None:
        return known[0]
    if device.name != "cpu":
        return None
    speed = probe_backend(device.backend, device.name, threads)
    book.note_probe(key, speed, now_s)
    return speed


def fit_here(
    model: Model,
    folder: Path,
    *,
    devices: Sequence[ComputeDevice] | None = None,
    measure: Measure = measured_speed,
) -> Fit:
    """On the best device that it fits on, else on the one where least is missing."""
    usable = [device for device in devices or find_devices() if device.is_usable]
    fits = [(device, _fit(model, device)) for device in usable]
    device, fit = next(
        (each for each in fits if not each[1].missing_bytes),
        min(fits, key=lambda each: each[1].missing_bytes),
    )
    speed = None if fit.missing_bytes else measure(device, folder)
    if speed is None:
        return fit
    work_bytes = sizes_of(model).work_bytes(0, model.layer_count)
    tokens_per_s = 1 / (speed.overhead_s + speed.seconds_per_byte * work_bytes)
    return Fit(fit.device, fit.needed_bytes, fit.free_bytes, tokens_per_s)


def _fit(model: Model, device: ComputeDevice) -> Fit:
    needed_bytes = sizes_of(model).on(holding_of(device.backend, device.name)).total_bytes
    # A process lies in the machine's own memory.
    own_bytes = process_bytes(device.backend) if device.is_host_memory else 0
    return Fit(device.label or device.name, needed_bytes + own_bytes, offered_bytes(device))
