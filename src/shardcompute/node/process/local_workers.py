"""Local workers: how the workers that one command starts share a machine, its devices, memory and threads.

A device has a worker of its own. On the CPU alone several share the machine, so that the loss of one is survived. What
computes in the machine's own memory shares that: none of it is offered twice.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shardcompute.backends.device_choice import ChosenDevices
from shardcompute.backends.devices import ComputeDevice, offered_bytes
from shardcompute.backends.processor import default_threads
from shardcompute.node.worker.power.terms import PowerTerms

PLACES_FOLDER = "places"
"""In a worker's folder: those of the devices beside the first."""
MOST_WORKERS = 3
_WORKER_NEEDS_BYTES = 3 << 29


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """A worker to run on this machine, and what it may use."""

    name: str
    """Of its folder, its process and its log."""
    title: str
    """What people call the node."""
    device: ComputeDevice
    threads: int
    max_memory_bytes: int
    unused: tuple[ComputeDevice, ...] = ()
    """GPUs of the machine that cannot be used; the first worker tells of them."""
    power: PowerTerms = field(default_factory=PowerTerms)

    def command(self, folder: Path) -> tuple[str, ...]:
        """Starts it from `folder`, as a child of whoever runs this."""
        return (
            sys.executable,
            *("-m", "shardcompute.cli.supervised_worker"),
            *("--data-dir", str(folder)),
            *("--name", self.title),
            *("--threads", str(self.threads)),
            *("--max-memory", str(self.max_memory_bytes)),
            *("--found", encode_found(ChosenDevices((self.device,), self.unused))),
            *self.power.arguments(),
        )


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    each: tuple[LocalWorker, ...]

    @property
    def count(self) -> int:
        return len(self.each)


def choose_worker_count(available_bytes: int) -> int:
    """On the CPU. Three, so that the loss of one is survived at once; fewer where memory is short."""
    return max(1, min(MOST_WORKERS, available_bytes // _WORKER_NEEDS_BYTES))


def share_machine(
    chosen: ChosenDevices,
    *,
    count: int | None = None,
    threads: int | None = None,
    max_memory_bytes: int | None = None,
    title: str = "",
    power: PowerTerms | None = None,
) -> LocalWorkers:
    """A worker for each device, or `count` of them in turns. What is not chosen is shared out evenly, and so is what
    the machine draws and costs. `title`: what people call the machine."""
    is_cpu_alone = not any(device.is_gpu for device in chosen.devices)
    if count is None and is_cpu_alone:
        count = choose_worker_count(chosen.devices[0].free_bytes)
    count = count or len(chosen.devices)
    used = [chosen.devices[number % len(chosen.devices)] for number in range(count)]
    return LocalWorkers(
        tuple(
            LocalWorker(
                name=name,
                title=name if is_cpu_alone else f"{title or platform.node() or 'worker'}/{place}",
                device=device,
                threads=threads or max(1, default_threads() // count),
                max_memory_bytes=offered_bytes(
                    device, limit_bytes=max_memory_bytes, sharers=_sharers(device, used)
                ),
                unused=chosen.unused if number == 0 else (),
                power=(power or PowerTerms()).shared_by(count),
            )
            for number, (device, name, place) in enumerate(_named(used, is_cpu_alone=is_cpu_alone))
        )
    )


def encode_found(found: ChosenDevices) -> str:
    return msgspec.json.encode(found).decode()


def decode_found(text: str) -> ChosenDevices:
    return msgspec.json.decode(text, type=ChosenDevices)


def folder_name(device: ComputeDevice) -> str:
    """As files are called on every system."""
    return device.name.replace(":", "-")


def place_folders(folder: Path) -> list[Path]:
    """Of the devices beside the first that have joined from `folder`."""
    return sorted(path for path in (folder / PLACES_FOLDER).glob("*") if path.is_dir())


def _named(devices: list[ComputeDevice], *, is_cpu_alone: bool) -> list[tuple[ComputeDevice, str, str]]:
    """Each with the name of its worker, and that of its place on the machine."""
    if is_cpu_alone:
        return [(device, f"worker-{number}", "") for number, device in enumerate(devices, 1)]
    named, seen = [], Counter[str]()
    for device in devices:
        seen[device.name] += 1
        again = f"-{seen[device.name]}" if seen[device.name] > 1 else ""
        named.append((device, f"{folder_name(device)}{again}", f"{device.name}{again}"))
    return named


def _sharers(device: ComputeDevice, used: list[ComputeDevice]) -> int:
    """How many workers compute in the same memory."""
    if device.is_host_memory:
        return sum(each.is_host_memory for each in used)
    return sum(each.name == device.name for each in used)
