"""What a driver needs of a chain: where its frames go, what shape it has, what it still knows after a repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardcompute.core.steps import Frame, Opening, SessionRows


class ChainPort(Protocol):
    """Where a driver's frames go. Neither method blocks for long, and neither calls the driver back directly."""

    def send(self, frame: Frame) -> None:
        """Start a step; its results reach `Driver.take_results` or `Driver.step_failed` later, or never if the
        chain is lost."""
        ...

    def close_sessions(self, sessions: Sequence[int]) -> None:
        """Free these sessions' KV on every stage, after the frames sent so far."""
        ...

    def replay(self, work: SessionRows, opening: Opening | None) -> None:
        """Have the first stage, and it alone, compute these rows for their KV."""
        ...


@dataclass(frozen=True, slots=True)
class ChainShape:
    """What the driver must know of a chain: KV for how many tokens, how many stages, how large a step."""

    capacity_tokens: int
    stages: int = 1
    max_rows: int = 512
    max_wanted: int = 64
    can_share: bool = True
    """Whether a session can begin with another's memory."""
