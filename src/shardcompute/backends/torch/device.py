"""Device and number format to compute in."""

from __future__ import annotations

import importlib.util

import torch

from shardcompute.core.errors import BackendError, UsageError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """The named device, or BackendError if this machine or this torch has none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            "torch sees no CUDA device", hint="install a CUDA build of torch, or choose another --device"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise BackendError("torch sees no Apple GPU", hint="choose another --device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on CPUs, bfloat16 on GPUs, and float16 on CUDA GPUs too old for bfloat16."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UsageError(f"unknown number format {name!r}", hint=f"choose auto or one of {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        return torch.float16
    return torch.bfloat16


def can_fuse(device: torch.device) -> bool:
    """Whether our own kernels run there: a CUDA GPU of compute capability 8 or more, and Triton installed.

    AMD's GPUs, which torch calls CUDA devices too, are left to torch: our kernels hold instructions of NVIDIA's.
    """
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return bool(torch.cuda.get_device_capability(device)[0] >= 8)
