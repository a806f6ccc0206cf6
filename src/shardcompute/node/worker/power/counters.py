"""Energy counters of a machine: RAPL of its processors, NVML of an NVIDIA card.

A counter is used where it can be read, and only there: RAPL is open to root alone on most systems, and counts
processors and their memory, not the whole machine. What cannot be read stays unknown.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shardcompute.backends.devices import ComputeDevice

log = logging.getLogger(__name__)
_POWERCAP = Path("/sys/class/powercap")
_MOST_DOMAINS = 64
_NVML_NAME_BYTES = 96
_NVML_OK = 0


class EnergyCounter(Protocol):
    """Counts what a part of the machine has used since some moment."""

    @property
    def source(self) -> str:
        """In a word, who counts."""
        ...

    def joules(self) -> float:
        """Never less than before. OSError where it cannot be read any more."""
        ...


class RaplCounter:
    """Processors and their memory, as Linux shows them: packages, and DRAM where it is counted beside them."""

    source = "rapl"

    def __init__(self, folder: Path = _POWERCAP) -> None:
        """OSError where there is nothing that can be read."""
        domains = [path for path in sorted(folder.glob("intel-rapl:*"))[:_MOST_DOMAINS] if _is_counted(path)]
        if not domains:
            raise FileNotFoundError(f"no RAPL domain below {folder}")
        self._domains = {path: _number(path / "energy_uj") for path in domains}
        self._ranges = {path: _number(path / "max_energy_range_uj") for path in domains}
        self._counted_uj = 0

    def joules(self) -> float:
        for path, before in self._domains.items():
            now = _number(path / "energy_uj")
            # The counter begins anew after so many.
            self._counted_uj += now - before if now >= before else now - before + self._ranges[path]
            self._domains[path] = now
        return self._counted_uj / 1e6


def _is_counted(path: Path) -> bool:
    try:
        name = (path / "name").read_text().strip()
    except OSError:
        return False
    return name.startswith("package") or name == "dram"


def _number(path: Path) -> int:
    return int(path.read_text())


class NvmlCounter:
    """One NVIDIA card, by the library that its driver brings."""

    source = "nvml"

    def __init__(self, index: int, label: str, library: ctypes.CDLL | None = None) -> None:
        """The card of this index, where it is called so. OSError where there is none, or it does not count."""
        self._nvml = library or ctypes.CDLL(_library_name())
        self._call("nvmlInit_v2")
        self._card = ctypes.c_void_p()
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        # With one card that is seen, its number here may be another than the one that it has for others.
        number = 0 if count.value == 1 else index
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(self._card))
        name = ctypes.create_string_buffer(_NVML_NAME_BYTES)
        self._call("nvmlDeviceGetName", self._card, name, ctypes.c_uint(_NVML_NAME_BYTES))
        if label and name.value.decode(errors="replace") != label:
            raise FileNotFoundError(f"card {number} is {name.value!r} and not {label!r}")
        self._first = self._millijoules()

    def joules(self) -> float:
        return (self._millijoules() - self._first) / 1e3

    def _millijoules(self) -> int:
        used = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._card, ctypes.byref(used))
        return used.value

    def _call(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self._nvml, name)(*arguments)
        except AttributeError as error:
            raise FileNotFoundError(f"this NVML has no {name}") from error
        if code != _NVML_OK:
            raise OSError(f"{name} answers with {code}")


def _library_name() -> str:
    elsewhere = ctypes.util.find_library("nvidia-ml") or "libnvidia-ml.so.1"
    return "nvml.dll" if sys.platform == "win32" else elsewhere


def find_counter(device: ComputeDevice) -> EnergyCounter | None:
    """What counts the energy of a device; None where nothing does that may be read."""
    if device.name.startswith("cuda"):
        index = device.name.partition(":")[2]
        return _opened(lambda: NvmlCounter(int(index or 0), device.label))
    if device.name == "cpu":
        return _opened(RaplCounter)
    return None


def _opened(open_counter: Callable[[], EnergyCounter]) -> EnergyCounter | None:
    try:
        return open_counter()
    except (OSError, ValueError) as error:
        log.debug("no energy counter: %s", error)
        return None
