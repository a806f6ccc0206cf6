"""Transfers between host and device that neither waits for. Torch keeps pinned memory until the device is done."""

from __future__ import annotations

import torch

from shardcompute.backends.matrix import Array

_STAGE_BYTES = 32 << 20
_STAGES = 3
_LEAST_STAGED_BYTES = 1 << 20
"""Of less than this a plain copy is as good."""


class Download:
    """A tensor of the device on its way to the host."""

    def __init__(self, source: torch.Tensor) -> None:
        # A pageable copy of a few rows of logits costs as much as half a step.
        self._target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._target.copy_(source, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def is_ready(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> Array:
        self._done.synchronize()
        array: Array = self._target.numpy()
        return array


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host's tensor on its way to the device."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_weights(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host's tensor on a CUDA device. Large ones pass through pinned memory a piece at a time: all cores
    fill one piece while the device takes the one before, where a plain copy has one core do both in turns."""
    size = values.numel() * values.element_size()
    if size < _LEAST_STAGED_BYTES:
        return values.to(device)
    source = values.reshape(-1).view(torch.uint8)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    staged: list[tuple[torch.Tensor, torch.cuda.Event]] = []
    for number, start in enumerate(range(0, size, _STAGE_BYTES)):
        if number < _STAGES:
            pinned = torch.empty(min(size, _STAGE_BYTES), dtype=torch.uint8, pin_memory=True)
            staged.append((pinned, torch.cuda.Event()))
        stage, taken = staged[number % _STAGES]
        # One that was never used is not waited for.
        taken.synchronize()
        part = source[start : start + _STAGE_BYTES]
        stage[: len(part)].copy_(part)
        target[start : start + len(part)].copy_(stage[: len(part)], non_blocking=True)
        taken.record(torch.cuda.current_stream(device))
    return target.view(values.dtype).view(values.shape)
