"""Compute devices: what is found on machines of many kinds, within which memory, and what is said of the useless."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from shardcompute.backends.device_probes import (
    DeviceReport,
    HostMemory,
    ProbeError,
    ReportedGpu,
    SeenGpu,
    TorchBuild,
)
from shardcompute.backends.devices import (
    HOST_FRACTION,
    LEAST_RESERVE_BYTES,
    MOST_RESERVE_BYTES,
    ComputeDevice,
    describe_device,
    find_devices,
    host_device,
    offered_bytes,
    reserve_bytes,
    spare_bytes,
)
from support.fake_devices import (
    CUDA_TORCH,
    GIB,
    H200,
    SEEN_H200,
    FakeMachine,
    cuda_machine,
    second,
)


def _found(machine: FakeMachine) -> tuple[ComputeDevice, ...]:
    return find_devices(probes=machine.probes())


def test_none() -> None:
    machine = FakeMachine(build=CUDA_TORCH)
    [cpu] = _found(machine)
    assert (cpu.name, cpu.backend, cpu.label, cpu.is_usable) == ("cpu", "onnx", "AMD Ryzen 5", True)
    assert offered_bytes(cpu) == 8 * GIB
    # Nobody waits for torch to start where there is nothing to ask it for.
    assert machine.asked == []


def test_one_cuda_gpu() -> None:
    gpu, cpu = _found(cuda_machine())
    assert (gpu.name, gpu.backend, gpu.label) == ("cuda:0", "torch", "NVIDIA H200")
    assert (gpu.total_bytes, gpu.free_bytes) == (140 * GIB, 138 * GIB)
    assert offered_bytes(gpu) == 136 * GIB
    assert describe_device(gpu) == "cuda:0: NVIDIA H200, 140.0 GiB, 138.0 GiB free"
    assert cpu.name == "cpu"


def test_two_gpus_each_with_its_own_memory() -> None:
    small = msgspec.structs.replace(second(), total_bytes=8 * GIB, free_bytes=7 * GIB)
    first, other, _ = _found(cuda_machine(H200, small))
    assert (first.name, other.name) == ("cuda:0", "cuda:1")
    assert offered_bytes(other) == 7 * GIB - LEAST_RESERVE_BYTES


def test_rocm_is_called_cuda() -> None:
    gpu = ReportedGpu(
        label="AMD Radeon RX 7900 XTX", total_bytes=24 * GIB, free_bytes=23 * GIB, arch="gfx1100"
    )
    machine = FakeMachine(
        seen=(SeenGpu(maker="amd", label="AMD GPU gfx1100", total_bytes=24 * GIB),),
        build=TorchBuild("2.13.0+rocm6.4", hip="6.4"),
        report=DeviceReport(version="2.13.0+rocm6.4", hip="6.4", arches=("gfx1030", "gfx1100"), gpus=(gpu,)),
    )
    found = _found(machine)[0]
    assert (found.name, found.backend, found.label, found.is_usable) == (
        "cuda:0",
        "torch",
        "AMD Radeon RX 7900 XTX",
        True,
    )


@pytest.mark.parametrize(("has_mlx", "name", "backend"), [(True, "mlx", "mlx"), (False, "mps", "torch")])
def test_apple_silicon_prefers_mlx_and_shares_the_machines_memory(
    has_mlx: bool, name: str, backend: str
) -> None:
    machine = FakeMachine(
        seen=(SeenGpu(maker="apple", label="Apple M4"),),
        build=TorchBuild("2.13.0"),
        has_mlx=has_mlx,
        report=DeviceReport(gpus=(ReportedGpu(total_bytes=16 * GIB, free_bytes=12 * GIB),)),
        platform="Darwin",
    )
    gpu = _found(machine)[0]
    assert (gpu.name, gpu.backend, gpu.label, gpu.is_host_memory) == (name, backend, "Apple M4", True)
    assert machine.asked == [backend]
    # The host has 10 GiB free, whatever the GPU might be given.
    assert offered_bytes(gpu) == 8 * GIB
    assert offered_bytes(gpu, sharers=2) == 4 * GIB


OLD = replace(SEEN_H200, label="NVIDIA GeForce GTX 1080", driver="550.120", capability=(6, 1))
ANCIENT = replace(SEEN_H200, label="NVIDIA Tesla K80", driver="470.82", capability=(3, 7))
AMD = SeenGpu(maker="amd", label="AMD GPU gfx1100", total_bytes=24 * GIB)
_WHEELS = "https://download.pytorch.org/whl"
UNUSABLE = {
    "no torch": (
        FakeMachine(seen=(SEEN_H200,)),
        "torch is not installed",
        "pip install 'shardcompute[torch]'",
    ),
    "no torch, on Windows": (
        FakeMachine(seen=(SEEN_H200,), platform="Windows"),
        "torch is not installed",
        f"pip install torch --index-url {_WHEELS}/cu130",
    ),
    "no torch, old card and driver": (
        FakeMachine(seen=(OLD,)),
        "torch is not installed",
        f"pip install 'torch<2.15' --index-url {_WHEELS}/cu126",
    ),
    "no torch for it": (
        FakeMachine(seen=(ANCIENT,)),
        "torch is not installed",
        "no torch has code for it: --device cpu computes without it",
    ),
    "torch for CPUs": (
        FakeMachine(seen=(SEEN_H200,), build=TorchBuild("2.13.0+cpu")),
        "torch 2.13.0+cpu is built for CPUs only",
        f"pip install --force-reinstall torch --index-url {_WHEELS}/cu130",
    ),
    "torch for the other maker": (
        FakeMachine(seen=(AMD,), build=CUDA_TORCH),
        "torch 2.13.0+cu130 is built for NVIDIA's GPUs",
        f"pip install --force-reinstall torch --index-url {_WHEELS}/rocm6.4",
    ),
    "not this user's": (
        FakeMachine(seen=(replace(AMD, is_permitted=False),), build=TorchBuild("2.13", hip="6.4")),
        "this user may not use /dev/kfd",
        'sudo usermod -aG render,video "$USER", then log in again',
    ),
    "driver too old": (
        FakeMachine(
            seen=(replace(SEEN_H200, driver="550.120"),),
            build=CUDA_TORCH,
            report=DeviceReport(
                version="2.13.0+cu130",
                cuda="13.0",
                error="The NVIDIA driver on your system is too old (found version 12040).",
            ),
        ),
        "its driver 550.120 is too old for torch 2.13.0+cu130 with CUDA 13.0",
        f"pip install --force-reinstall 'torch<2.15' --index-url {_WHEELS}/cu126",
    ),
    "driver too old for every torch": (
        FakeMachine(
            seen=(replace(SEEN_H200, driver="470.82"),),
            build=CUDA_TORCH,
            report=DeviceReport(version="2.13.0", cuda="13.0", error="CUDA driver version is insufficient"),
        ),
        "its driver 470.82 is too old for torch 2.13.0 with CUDA 13.0",
        "update its driver to 580 or newer: https://www.nvidia.com/drivers",
    ),
    "hidden": (
        FakeMachine(
            seen=(SEEN_H200,), build=CUDA_TORCH, report=DeviceReport(version="2.13", error="No CUDA GPUs")
        ),
        "torch 2.13 finds no device: No CUDA GPUs",
        "see whether nvidia-smi answers and CUDA_VISIBLE_DEVICES hides it; a restart helps after a driver's update",
    ),
    "card too old for this torch": (
        cuda_machine(msgspec.structs.replace(H200, capability=(6, 1))),
        "torch 2.13.0+cu130 has no code for compute capability 6.1",
        f"pip install --force-reinstall 'torch<2.15' --index-url {_WHEELS}/cu126",
    ),
    "no code after all": (
        cuda_machine(msgspec.structs.replace(H200, error="CUDA error: no kernel image is available")),
        "torch 2.13.0+cu130 has no code for compute capability 9.0",
        f"pip install --force-reinstall torch --index-url {_WHEELS}/cu130",
    ),
    "no memory for a context": (
        cuda_machine(msgspec.structs.replace(H200, error="CUDA error: out of memory")),
        "no memory is free on it",
        "end what uses it (nvidia-smi shows that), then start again; or leave cuda:0 out with --device cpu",
    ),
    "no memory free": (
        cuda_machine(msgspec.structs.replace(H200, free_bytes=GIB)),
        "only 1.0 GiB of its 140.0 GiB are free",
        "end what uses it (nvidia-smi shows that), then start again; or leave cuda:0 out with --device cpu",
    ),
    "broken": (
        cuda_machine(msgspec.structs.replace(H200, error="CUDA error: an illegal memory access")),
        "it does not compute: CUDA error: an illegal memory access",
        "restart the machine or the GPU's driver; until then --device cpu computes without it",
    ),
    "hangs or fails": (
        FakeMachine(seen=(SEEN_H200,), build=CUDA_TORCH, report=ProbeError("it hangs", "restart it")),
        "it hangs",
        "restart it",
    ),
    "apple without anything": (
        FakeMachine(seen=(SeenGpu(maker="apple", label="Apple M4"),), platform="Darwin"),
        "neither mlx nor torch is installed",
        "pip install 'shardcompute[mlx]'",
    ),
    "apple without Metal": (
        FakeMachine(seen=(SeenGpu(maker="apple", label="Apple M4"),), has_mlx=True, platform="Darwin"),
        "Metal is not available to this process",
        "pip install 'shardcompute[mlx]'",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_gpus_are_told_with_the_line_that_fixes_them(case: str) -> None:
    machine, problem, fix = UNUSABLE[case]
    cpu, gpu = _found(machine)
    assert (gpu.problem, gpu.fix) == (problem, fix)
    assert not gpu.is_usable
    # Work goes on without it.
    assert cpu.name == "cpu"
    assert cpu.is_usable
    assert describe_device(gpu).endswith(f"cannot be used, {problem}; {fix}")


@pytest.mark.parametrize(
    ("total", "free", "offered", "remark"),
    [
        (140 * GIB, 200 * GIB, 138 * GIB, "it says that 200.0 GiB are free, more than it has"),
        (1000 * GIB, 999 * GIB, 138 * GIB, "it says 1000.0 GiB, its driver 140.0 GiB: that counts"),
    ],
)
def test_a_gpu_that_lies_is_believed_within_bounds(total: int, free: int, offered: int, remark: str) -> None:
    gpu = _found(cuda_machine(msgspec.structs.replace(H200, total_bytes=total, free_bytes=free)))[0]
    assert gpu.is_usable
    assert gpu.remark == remark
    assert gpu.total_bytes == 140 * GIB
    assert offered_bytes(gpu) == offered
    assert remark in describe_device(gpu)


def test_driver_and_torch_may_count_a_little_differently() -> None:
    # As seen on an idle H200: torch has 139.8 GiB in all, its driver somewhat more free.
    total = 150_109_880_320
    gpu = _found(
        cuda_machine(msgspec.structs.replace(H200, total_bytes=total, free_bytes=total + (6 << 20)))
    )[0]
    assert (gpu.remark, gpu.free_bytes) == ("", total)


@pytest.mark.parametrize("total", [0, -1, 1 << 60])
def test_a_gpu_whose_memory_cannot_be_is_not_used(total: int) -> None:
    cpu, gpu = _found(cuda_machine(msgspec.structs.replace(H200, total_bytes=total)))
    assert gpu.problem == f"it says that it has {total} bytes of memory, which cannot be"
    assert (gpu.total_bytes, gpu.free_bytes, cpu.is_usable) == (0, 0, True)


def test_less_than_nothing_is_nothing() -> None:
    _, gpu = _found(cuda_machine(msgspec.structs.replace(H200, free_bytes=-5)))
    assert gpu.problem == "only 0 bytes of its 140.0 GiB are free (it says that -5 bytes are free)"


def test_what_a_driver_calls_a_gpu_is_a_short_line() -> None:
    gpu = _found(cuda_machine(msgspec.structs.replace(H200, label="\x1b[31mNVIDIA\n" + "x" * 500)))[0]
    assert gpu.label.isprintable()
    assert len(gpu.label) <= 100


def test_the_reserve_grows_with_the_card_within_bounds() -> None:
    card = ComputeDevice(name="cuda:0", backend="torch", label="", total_bytes=4 * GIB, free_bytes=4 * GIB)
    assert offered_bytes(card) == 4 * GIB - LEAST_RESERVE_BYTES
    large = replace(card, total_bytes=200 * GIB, free_bytes=200 * GIB)
    assert offered_bytes(large) == 200 * GIB - MOST_RESERVE_BYTES
    middle = replace(card, total_bytes=20 * GIB, free_bytes=20 * GIB)
    assert offered_bytes(middle) == 19 * GIB


def test_a_limit_is_a_limit() -> None:
    gpu, cpu = _found(cuda_machine())
    assert offered_bytes(gpu, limit_bytes=8 * GIB) == 8 * GIB
    assert offered_bytes(gpu, limit_bytes=1 << 50) == 136 * GIB
    # Of host memory, which can be swapped, whoever sets a limit may go up to all that there is.
    assert offered_bytes(cpu, limit_bytes=12 * GIB) == 12 * GIB
    assert offered_bytes(cpu, limit_bytes=1 << 50) == 16 * GIB


def test_a_machine_that_says_nothing_of_its_own_memory_offers_none() -> None:
    [cpu] = find_devices(probes=FakeMachine(host=HostMemory("", 0, 0)).probes())
    assert offered_bytes(cpu) == 0
    assert cpu.label == "unknown"


def _card() -> ComputeDevice:
    return ComputeDevice(
        name="cuda:0", backend="torch", label="Card", total_bytes=24 << 30, free_bytes=20 << 30
    )


@pytest.mark.parametrize(
    ("free", "kept", "spare"),
    [(10 << 30, 2 << 30, 12 << 30), (1 << 60, 0, 24 << 30), (-5, 0, 0), (1 << 20, 0, 0)],
    ids=["honest", "more than it has", "less than nothing", "less than the reserve"],
)
def test_what_a_gpu_can_spare_now_is_believed_within_bounds(
    monkeypatch: pytest.MonkeyPatch, free: int, kept: int, spare: int
) -> None:
    """What torch keeps for its next allocation is free as well."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        mem_get_info=lambda device: (free, 24 << 30),
        memory_reserved=lambda device: (3 << 30) + kept,
        memory_allocated=lambda device: 3 << 30,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    reserve = reserve_bytes(_card()) if spare else 0
    assert spare_bytes(_card()) == spare - reserve


def test_a_gpu_that_nobody_computes_on_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert spare_bytes(_card()) is None


def test_the_host_can_spare_most_of_what_is_free() -> None:
    host = host_device()
    spare = spare_bytes(host)
    assert spare is not None
    assert 0 < spare <= HOST_FRACTION * host.total_bytes
