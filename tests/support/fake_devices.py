"""Machines with GPUs that are not there: probes that say what a test wants them to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from shardcompute.backends.device_probes import (
    DeviceProbes,
    DeviceReport,
    HostMemory,
    ProbeError,
    ReportedGpu,
    SeenGpu,
    TorchBuild,
)

GIB = 1 << 30
RYZEN = HostMemory("AMD Ryzen 5", 16 * GIB, 10 * GIB)
CUDA_TORCH = TorchBuild("2.13.0+cu130", cuda="13.0")
H200 = ReportedGpu(
    label="NVIDIA H200", uuid="h", total_bytes=140 * GIB, free_bytes=138 * GIB, capability=(9, 0)
)
SEEN_H200 = SeenGpu(
    maker="nvidia",
    label="NVIDIA H200",
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    uuid="h",
    driver="580.65.06",
    capability=(9, 0),
)
ARCHES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


def second(gpu: ReportedGpu = H200) -> ReportedGpu:
    return ReportedGpu(
        index=1,
        label=gpu.label,
        uuid="i",
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        capability=gpu.capability,
    )


@dataclass
class FakeMachine:
    """What its probes find. `asked`: which libraries were started to ask for devices."""

    seen: tuple[SeenGpu, ...] = ()
    build: TorchBuild | None = None
    report: DeviceReport | ProbeError = field(default_factory=DeviceReport)
    has_mlx: bool = False
    host: HostMemory = RYZEN
    platform: str = "Linux"
    asked: list[str] = field(default_factory=list)

    def probes(self, *, asks_anew: bool = False) -> DeviceProbes:
        def ask(library: str) -> DeviceReport:
            self.asked.append(library)
            if isinstance(self.report, ProbeError):
                raise self.report
            return self.report

        return DeviceProbes(
            gpus=lambda: self.seen,
            torch=lambda: self.build,
            has_mlx=lambda: self.has_mlx,
            report=ask,
            host=lambda: self.host,
            platform=self.platform,
        )


def cuda_machine(*gpus: ReportedGpu, seen: SeenGpu = SEEN_H200) -> FakeMachine:
    """One on which torch finds these."""
    found = gpus or (H200,)
    return FakeMachine(
        seen=tuple(replace(seen, uuid=gpu.uuid) for gpu in found),
        build=CUDA_TORCH,
        report=DeviceReport(version="2.13.0+cu130", cuda="13.0", arches=ARCHES, gpus=found),
    )


def pretend(monkeypatch: pytest.MonkeyPatch, machine: FakeMachine) -> FakeMachine:
    """Let this process run there."""
    monkeypatch.setattr("shardcompute.backends.devices.system_probes", machine.probes)
    return machine
