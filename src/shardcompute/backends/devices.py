"""Compute devices of this machine: what there is to compute on, what it may offer, and why a GPU cannot be used.

`find_devices` looks at what the system shows of its GPUs (see `device_probes`) and asks torch or MLX, in a process of
their own and within a deadline, only where there is one. What a device says of its memory is believed within bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardcompute.backends import device_problems as problems
from shardcompute.backends.device_memory import free_device_bytes
from shardcompute.backends.device_probes import (
    DeviceProbes,
    DeviceReport,
    ProbeError,
    ReportedGpu,
    SeenGpu,
    host_memory,
    system_probes,
)
from shardcompute.core.units import format_bytes

HOST_FRACTION = 0.8
"""Of the host memory that is free, what workers may have together."""
RESERVE_FRACTION = 1 / 20
LEAST_RESERVE_BYTES = 512 << 20
MOST_RESERVE_BYTES = 2 << 30
LEAST_OFFER_BYTES = 256 << 20
"""A device with less than this to offer is of no use."""
MOST_DEVICE_BYTES = 1 << 44
"""No device has more; one that says so does not know."""
_SAME_BYTES = 1.02
"""Driver and torch count a card's memory a little differently: an idle one may have more free than it has."""
_MOST_LABEL = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    """A device with the backend that computes on it. One with a `problem` cannot be used; `fix` is the line that would
    change that. `remark`: what it said of its memory that cannot be, and what is believed instead."""

    name: str
    """As options name it: cpu, cuda:0 (also of ROCm), mps, mlx."""
    backend: str
    label: str
    """What people call it, such as NVIDIA H200."""
    total_bytes: int
    free_bytes: int
    is_host_memory: bool = False
    """It computes in the machine's own memory, which it shares with all others that do."""
    problem: str = ""
    fix: str = ""
    remark: str = ""
    alternatives: tuple[str, ...] = ()
    """Other backends that may compute on it instead, model by model, because nobody named one."""
    arch: str = ""
    """What a GPU's kernels are made for, such as sm_90 or gfx1100."""

    @property
    def is_usable(self) -> bool:
        return not self.problem

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


def find_devices(
    backend: str = "", probes: DeviceProbes | None = None, *, asks_anew: bool = False
) -> tuple[ComputeDevice, ...]:
    """What can be used, the best first and the CPU last; then what is there and cannot be. `backend`: which one is to
    compute, where a GPU suits several. `asks_anew`: whatever was found before."""
    probes = probes or system_probes(asks_anew=asks_anew)
    seen = tuple(probes.gpus())
    gpus = _find_gpus(probes, seen, backend) if seen else []
    usable = [gpu for gpu in gpus if gpu.is_usable]
    return (*usable, host_device(probes), *(gpu for gpu in gpus if not gpu.is_usable))


def host_device(probes: DeviceProbes | None = None, backend: str = "onnx") -> ComputeDevice:
    """The CPU, in the machine's own memory."""
    host = (probes or system_probes()).host()
    return _bounded(
        ComputeDevice(
            name="cpu",
            backend=backend,
            label=_plain(host.label),
            total_bytes=host.total_bytes,
            free_bytes=host.free_bytes,
            is_host_memory=True,
        )
    )


def reserve_bytes(device: ComputeDevice) -> int:
    """What is left free on a device of its own memory: for its context, workspaces, and what else shows pictures."""
    wanted = int(device.total_bytes * RESERVE_FRACTION)
    return min(MOST_RESERVE_BYTES, max(LEAST_RESERVE_BYTES, wanted))


def offered_bytes(device: ComputeDevice, *, limit_bytes: int | None = None, sharers: int = 1) -> int:
    """What one of `sharers` workers in the same memory may use: of a GPU what is free less the reserve, of the host
    most of what is free, and never more than the limit. A limit is taken at its word for host memory, which can be
    swapped, as far as the machine has so much."""
    if device.is_host_memory:
        most = device.total_bytes if limit_bytes else int(device.free_bytes * HOST_FRACTION) // sharers
    else:
        most = max(0, device.free_bytes - reserve_bytes(device)) // sharers
    return most if limit_bytes is None else min(limit_bytes, most)


def spare_bytes(device: ComputeDevice) -> int | None:
    """What may be taken of a device's memory now, besides what this process holds there; None where nobody can tell.
    What it says is believed within bounds."""
    if device.is_host_memory:
        free = host_memory().free_bytes
        return int(min(max(0, free), device.total_bytes) * HOST_FRACTION)
    said = free_device_bytes(device.name)
    return None if said is None else max(0, min(said, device.total_bytes) - reserve_bytes(device))


def describe_device(device: ComputeDevice) -> str:
    """One line for people."""
    memory = f", {format_bytes(device.total_bytes)}" if device.total_bytes else ""
    if device.problem:
        return f"{device.label}{memory}: cannot be used, {device.problem}; {device.fix}"
    remark = f" ({device.remark})" if device.remark else ""
    return f"{device.name}: {device.label}{memory}, {format_bytes(device.free_bytes)} free{remark}"


def _find_gpus(probes: DeviceProbes, seen: Sequence[SeenGpu], backend: str) -> list[ComputeDevice]:
    if seen[0].maker == "apple":
        return [_apple_gpu(probes, seen[0], has_mlx=probes.has_mlx() and backend in ("", "mlx"))]
    build = probes.torch()
    unusable = problems.without_use(build, seen, probes.platform)
    if unusable is not None:
        return [_unusable(gpu, index, *unusable(gpu)) for index, gpu in enumerate(seen)]
    try:
        report = probes.report("torch")
    except ProbeError as error:
        return [_unusable(gpu, index, str(error), error.fix) for index, gpu in enumerate(seen)]
    if not report.gpus:
        told = problems.without_devices(report, seen, probes.platform)
        return [_unusable(gpu, index, *told(gpu)) for index, gpu in enumerate(seen)]
    return [_torch_gpu(gpu, report, seen, probes.platform) for gpu in report.gpus]


def _torch_gpu(
    gpu: ReportedGpu, report: DeviceReport, seen: Sequence[SeenGpu], platform: str
) -> ComputeDevice:
    device = ComputeDevice(
        name=f"cuda:{gpu.index}",
        backend="torch",
        label=_plain(gpu.label),
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        arch="sm_{}{}".format(*gpu.capability) if gpu.capability and not report.hip else gpu.arch,
    )
    found = problems.of_reported(gpu, report, platform)
    if found is not None:
        return replace(device, total_bytes=max(0, gpu.total_bytes), problem=found[0], fix=found[1])
    twin = next((each for each in seen if each.uuid and each.uuid == gpu.uuid), None)
    return _with_room(_bounded(device, twin.total_bytes if twin is not None else 0))


def _apple_gpu(probes: DeviceProbes, seen: SeenGpu, *, has_mlx: bool) -> ComputeDevice:
    """MLX where it is installed, else torch's MPS."""
    name, backend = ("mlx", "mlx") if has_mlx else ("mps", "torch")
    blank = ComputeDevice(
        name=name, backend=backend, label=seen.label, total_bytes=0, free_bytes=0, is_host_memory=True
    )
    if backend == "torch" and probes.torch() is None:
        return replace(blank, name="mlx", backend="mlx", problem=problems.NO_APPLE, fix=problems.APPLE_FIX)
    try:
        report = probes.report(backend)
    except ProbeError as error:
        return replace(blank, problem=str(error), fix=error.fix)
    if not report.gpus:
        return replace(blank, problem=report.error or problems.NO_METAL, fix=problems.APPLE_FIX)
    gpu, host = report.gpus[0], probes.host()
    if gpu.error:
        return replace(blank, problem=gpu.error, fix=problems.APPLE_FIX)
    return _with_room(
        _bounded(
            replace(
                blank,
                label=_plain(gpu.label or seen.label),
                total_bytes=gpu.total_bytes,
                # What the GPU may have of it, and what others have not taken.
                free_bytes=min(gpu.free_bytes, host.free_bytes),
            ),
            host.total_bytes,
        )
    )


def _unusable(seen: SeenGpu, index: int, problem: str, fix: str) -> ComputeDevice:
    total = seen.total_bytes if 0 < seen.total_bytes <= MOST_DEVICE_BYTES else 0
    return ComputeDevice(
        name=f"cuda:{index}",
        backend="torch",
        label=_plain(seen.label),
        total_bytes=total,
        free_bytes=max(0, min(seen.free_bytes, total)),
        problem=problem,
        fix=fix,
    )


def _bounded(device: ComputeDevice, known_total_bytes: int = 0) -> ComputeDevice:
    """A device whose memory is what it can be, with a remark where it said something else. `known_total_bytes`: what
    somebody else says that it has in all."""
    total, free = device.total_bytes, device.free_bytes
    if not 0 < total <= MOST_DEVICE_BYTES:
        return replace(
            device,
            total_bytes=0,
            free_bytes=0,
            problem=f"it says that it has {total} bytes of memory, which cannot be",
            fix=problems.RESTART_DRIVER,
        )
    remarks = []
    if 0 < known_total_bytes < total * 0.9:
        remarks.append(
            f"it says {format_bytes(total)}, its driver {format_bytes(known_total_bytes)}: that counts"
        )
        total = known_total_bytes
    if free > total:
        if not remarks and free > total * _SAME_BYTES:
            remarks.append(f"it says that {format_bytes(free)} are free, more than it has")
        free = total
    elif free < 0:
        remarks.append(f"it says that {free} bytes are free")
        free = 0
    return replace(device, total_bytes=total, free_bytes=free, remark="; ".join(remarks))


def _with_room(device: ComputeDevice) -> ComputeDevice:
    """A problem where nothing useful is left on the device."""
    if device.problem or offered_bytes(device) >= LEAST_OFFER_BYTES:
        return device
    problem = f"only {format_bytes(device.free_bytes)} of its {format_bytes(device.total_bytes)} are free"
    if device.remark:
        problem = f"{problem} ({device.remark})"
    return replace(device, problem=problem, fix=problems.free_memory(device.name))


def _plain(label: str) -> str:
    """What a driver calls its device, as a short line."""
    return "".join(each for each in label if each.isprintable()).strip()[:_MOST_LABEL] or "unknown"
