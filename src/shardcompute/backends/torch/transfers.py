"""Transfers between host and device that neither waits for. Torch keeps pinned memory until the device is done."""

from __future__ import annotations

import torch

from shardcompute.backends.matrix import Array


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
