"""What chooses kernels on this machine: its processor's instruction set and the releases of the libraries.

Read from the system and from package metadata, so that no backend is imported for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Set
from pathlib import Path

import psutil

from shardcompute.backends.devices import ComputeDevice
from shardcompute.backends.exactness import ExactnessClass, class_of
from shardcompute.backends.footprint import fallback_device

_PACKAGES = {
    "onnx": "onnxruntime",
    "torch": "torch",
    "transformers": "transformers",
    "mlx": "mlx",
    "numpy": "numpy",
    "llamacpp": "xllamacpp",
}
_X86 = (("avx512_vnni", "avx512-vnni"), ("avx512f", "avx512"), ("avx_vnni", "avx2-vnni"), ("avx2", "avx2"))
_ARM = (("i8mm", "arm64-i8mm"), ("asimddp", "arm64-dotprod"))
_CPUINFO = Path("/proc/cpuinfo")


def own_class(device: ComputeDevice, *, kv_type: str = "", backend: str = "") -> ExactnessClass:
    """The exactness class of what this process computes on a device, by its own backend or by another one."""
    is_cpu, backend = device.name == "cpu", backend or device.backend
    return class_of(
        backend,
        device.name,
        release=_release(backend),
        kernels=read_instruction_set() if is_cpu else device.label,
        arch=device.arch,
        has_triton=importlib.util.find_spec("triton") is not None,
        kv_type=kv_type,
    )


def own_fallback_class(device: ComputeDevice) -> str:
    """The name of the class of what `transformers` computes in this process; "" where it is not installed."""
    if any(importlib.util.find_spec(package) is None for package in ("torch", "transformers")):
        return ""
    kind = fallback_device(device.name)
    return class_of(
        "transformers",
        kind,
        release=f"{_release('transformers')}.torch.{importlib.metadata.version('torch')}".replace("/", "-"),
        kernels=read_instruction_set() if kind == "cpu" else device.label,
        arch=device.arch,
    ).name


def instruction_set(machine: str, flags: Set[str], model: str = "") -> str:
    """What libraries choose their kernels by; of a processor that does not say, its model."""
    machine = machine.lower()
    if machine in ("x86_64", "amd64", "i386", "i686"):
        found = next((name for flag, name in _X86 if flag in flags), None)
        return found or _plain(f"x86 {model}" if model and not flags else "x86")
    if machine in ("aarch64", "arm64"):
        found = next((name for flag, name in _ARM if flag in flags), None)
        return found or _plain(f"arm64 {model}" if model and not flags else "arm64")
    return _plain(machine or "unknown")


def read_instruction_set() -> str:
    return instruction_set(platform.machine(), _flags(), platform.processor())


def _flags() -> Set[str]:
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _release(backend: str) -> str:
    try:
        return importlib.metadata.version(_PACKAGES.get(backend, backend))
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _plain(text: str) -> str:
    """Without what separates the parts of a class's name."""
    return re.sub(r"[^A-Za-z0-9 ._-]", "-", text).strip()[:60]


def default_threads() -> int:
    """As many as this process may use, counting cores rather than hyper-threads."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))
