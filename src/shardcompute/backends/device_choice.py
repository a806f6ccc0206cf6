"""Device choice: from `--device` and `--backend`, either of which may be `auto`, to the devices that are used.

Choosing one side settles the other: cuda:1 is torch's, onnx computes on the CPU, torch on its best device. Lists and
`all` give several devices, each a place of its own.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardcompute.backends.devices import ComputeDevice, describe_device, find_devices, host_device
from shardcompute.backends.llamacpp.library import is_usable
from shardcompute.core.errors import BackendError, UsageError
from shardcompute.core.settings import load_settings

AUTO = "auto"
ALL = "all"
KINDS = {
    "onnx": ("cpu",),
    "numpy": ("cpu",),
    "transformers": ("cuda", "mps", "cpu"),
    "llamacpp": ("cpu",),
    "torch": ("cuda", "mps", "cpu"),
    "mlx": ("mlx", "cpu"),
}
"""On which kinds of device each backend computes, the best first."""
_PREFERRED = {"cpu": "onnx", "cuda": "torch", "mps": "torch", "mlx": "mlx"}
_NAME = re.compile(r"cpu|mps|mlx|cuda(:\d{1,3})?")
_NAMES = "auto, all, cpu, cuda, cuda:1, mps or mlx, several with commas between"
_PACKAGES = {"torch": "torch", "transformers": "torch", "mlx": "mlx"}
"""The extras that backends need, which are called as their packages are."""


@dataclass(frozen=True, slots=True)
class ChosenDevices:
    """What to compute on, the best first, and GPUs that are there and cannot be used."""

    devices: tuple[ComputeDevice, ...]
    unused: tuple[ComputeDevice, ...] = ()

    def describe(self) -> list[str]:
        """A line each, for whoever started this."""
        return [*map(describe_device, self.devices), *map(describe_device, self.unused)]


def check_choice(device: str, backend: str) -> None:
    """UsageError for what cannot be chosen on any machine."""
    names = _names(device)
    for name in names:
        if not _NAME.fullmatch(name) and name not in (AUTO, ALL):
            raise UsageError(f"{name!r} is not a device", hint=f"use {_NAMES}")
    if len(names) > 1 and {AUTO, ALL} & set(names):
        raise UsageError(f"{device!r} names a device and asks for a choice", hint="give one of them")
    if len(set(map(_whole, names))) < len(names):
        raise UsageError(f"{device!r} names a device twice", hint="name each of them once")
    for name in names:
        if backend != AUTO and name not in (AUTO, ALL) and _kind(name) not in KINDS[backend]:
            raise UsageError(
                f"the {backend} backend computes on {' or '.join(KINDS[backend])}, not on {name}",
                hint=f"leave --backend out, or say --backend {_PREFERRED[_kind(name)]}",
            )


def choose_devices(device: str, backend: str) -> ChosenDevices:
    """BackendError where a device that was named is not there or cannot be used."""
    check_choice(device, backend)
    if device == "cpu" or KINDS.get(backend) == ("cpu",):
        return ChosenDevices((_on_cpu(backend),))
    found = tuple(find_devices("" if backend == AUTO else backend))
    unused = tuple(each for each in found if not each.is_usable)
    usable = tuple(_with(backend, each) for each in found if each.is_usable and _suits(backend, each))
    if device == ALL:
        cpu = (_on_cpu(backend),) if backend == AUTO or "cpu" in KINDS[backend] else ()
        return ChosenDevices((*_gpus(usable), *cpu), unused)
    if device == AUTO:
        chosen = _gpus(usable) or (_on_cpu(backend),)
        return ChosenDevices(chosen, unused)
    return ChosenDevices(tuple(_named(name, backend, found) for name in _names(device)), unused)


def choose_device(device: str, backend: str) -> ChosenDevices:
    """The one device of a process that computes by itself. UsageError where several are named."""
    if device == ALL or len(_names(device)) > 1:
        raise UsageError(
            f"one process computes on one device, not on {device}",
            hint="name one, or start a cluster with a worker for each: shardcompute up",
        )
    chosen = choose_devices(device, backend)
    return replace(chosen, devices=chosen.devices[:1])


def _named(name: str, backend: str, found: Sequence[ComputeDevice]) -> ComputeDevice:
    if name == "cpu":
        return _on_cpu(backend)
    device = next((each for each in found if each.name == _whole(name)), None)
    if device is None:
        others = ", ".join(each.name for each in found if each.is_usable)
        raise BackendError(f"there is no {name} here", hint=f"this machine has {others}")
    if not device.is_usable:
        raise BackendError(f"{device.label} ({name}) cannot be used: {device.problem}", hint=device.fix)
    return _with(backend, device)


def _on_cpu(backend: str) -> ComputeDevice:
    package = _PACKAGES.get(backend)
    if package is not None and importlib.util.find_spec(package) is None:
        raise BackendError(
            f"the {backend} backend needs {package}", hint=f"pip install 'shardcompute[{package}]'"
        )
    if backend != AUTO:
        return host_device(backend=backend)
    return replace(host_device(backend=_PREFERRED["cpu"]), alternatives=_alternatives())


def _alternatives() -> tuple[str, ...]:
    return ("llamacpp",) if load_settings().cpu_backend != "onnx" and is_usable() else ()


def _suits(backend: str, device: ComputeDevice) -> bool:
    return backend == AUTO or _kind(device.name) in KINDS[backend]


def _with(backend: str, device: ComputeDevice) -> ComputeDevice:
    return device if backend == AUTO else replace(device, backend=backend)


def _gpus(devices: Sequence[ComputeDevice]) -> tuple[ComputeDevice, ...]:
    return tuple(each for each in devices if each.is_gpu)


def _names(device: str) -> list[str]:
    return [name.strip() for name in device.split(",")]


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _whole(name: str) -> str:
    return "cuda:0" if name == "cuda" else name
