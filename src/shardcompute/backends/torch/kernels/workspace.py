"""Memory that kernels need for themselves."""

from __future__ import annotations

import torch


class Workspace:
    """Scratch memory that grows. What it gave out before stays alive, since captured graphs point at it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[torch.Tensor] = []
        self._parts = torch.empty(0, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)

    def parts(self, size: int) -> torch.Tensor:
        """float32, undefined."""
        if size > self._parts.numel():
            self._held.append(self._parts)
            self._parts = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._parts

    def counters(self, size: int) -> torch.Tensor:
        """int32, zero; every kernel leaves them zero."""
        if size > self._counters.numel():
            self._held.append(self._counters)
            self._counters = torch.zeros(size, dtype=torch.int32, device=self._device)
        return self._counters
