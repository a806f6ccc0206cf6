"""Device report: the GPUs of this machine by torch or MLX, as one line of JSON. Run as a process of its own.

A context on a GPU takes memory, and a driver can hang or take the process down: whoever asks wants neither. Every GPU
computes a sum, so that one for which the library has no code is known before anybody relies on it.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from shardcompute.backends.device_probes import DeviceReport, ReportedGpu

_MOST_ERROR = 300


def report_torch() -> DeviceReport:
    import torch

    arches: tuple[str, ...] = ()
    error = ""
    gpus: tuple[ReportedGpu, ...] = ()
    if torch.backends.mps.is_available():
        gpus = (_mps_gpu(torch),)
    elif torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
            arches = tuple(torch.cuda.get_arch_list())
            gpus = tuple(_cuda_gpu(torch, index) for index in range(torch.cuda.device_count()))
        except (RuntimeError, AssertionError) as failure:
            error = _first_line(failure)
    return DeviceReport(
        version=str(torch.__version__),
        cuda=torch.version.cuda or "",
        hip=torch.version.hip or "",
        arches=arches,
        gpus=gpus,
        error=error,
    )


def report_mlx() -> DeviceReport:
    import mlx.core as mx  # type: ignore[import-not-found, unused-ignore]

    if not mx.metal.is_available():
        return DeviceReport(error="MLX finds no Apple GPU here")
    about = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    total = int(about.get("memory_size", 0))
    gpu = ReportedGpu(
        label=str(about.get("device_name", "")),
        total_bytes=total,
        free_bytes=int(about.get("max_recommended_working_set_size", total)) - int(mx.get_active_memory()),
    )
    return DeviceReport(gpus=(gpu,))


def _cuda_gpu(torch: Any, index: int) -> ReportedGpu:
    about = torch.cuda.get_device_properties(index)
    gpu = ReportedGpu(
        index=index,
        label=str(about.name),
        uuid=str(getattr(about, "uuid", "")),
        total_bytes=int(about.total_memory),
        capability=(int(about.major), int(about.minor)),
        arch=str(getattr(about, "gcnArchName", "")).partition(":")[0],
    )
    try:
        free, total = torch.cuda.mem_get_info(index)
        torch.ones(8, device=f"cuda:{index}").sum().item()
    except RuntimeError as failure:
        return msgspec.structs.replace(gpu, error=_first_line(failure))
    return msgspec.structs.replace(gpu, free_bytes=int(free), total_bytes=int(total))


def _mps_gpu(torch: Any) -> ReportedGpu:
    most = int(torch.mps.recommended_max_memory())
    try:
        torch.ones(8, device="mps").sum().item()
    except RuntimeError as failure:
        return ReportedGpu(error=_first_line(failure))
    return ReportedGpu(total_bytes=most, free_bytes=most - int(torch.mps.driver_allocated_memory()))


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0][:_MOST_ERROR]


if __name__ == "__main__":
    made = report_mlx() if sys.argv[1:] == ["mlx"] else report_torch()
    sys.stdout.write(msgspec.json.encode(made).decode() + "\n")
