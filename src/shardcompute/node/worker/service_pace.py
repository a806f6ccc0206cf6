"""Service pace: how fast a shard's steps are against what was measured when it was loaded. Pure; no clock.

A card that throttles, or that a game shares, is slower for as long as that lasts. What is believed changes only when
several windows of many steps agree that it is clearly another than before, so that noise changes nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from shardcompute.node.worker.speed_probe import BATCH_ROWS, StageSpeed

LEAST_WINDOW_S = 5.0
_LEAST_STEPS = 24
_LEAST_PROMPT_STEPS = 6
_WINDOWS = 3
"""So many in a row have to agree."""
_CHANGE = 0.2
"""By so much of what was told before a pace must differ, in each of them, to be told."""
_LEAST_PROMPT_ROWS = 32
_MOST_RATIO = 1000.0


@dataclass(frozen=True, slots=True)
class ShardPace:
    """By how much decoding, and prompts, take longer than was measured; 1: as long."""

    decode: float = 1.0
    prefill: float = 1.0


@dataclass(slots=True)
class _Windows:
    """The ratios of one kind of steps, and what was told of them last."""

    least_steps: int
    told: float = 1.0
    _ratios: list[float] = field(default_factory=list)
    _began_s: float = 0.0
    _medians: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOWS))

    def add(self, ratio: float, now_s: float) -> bool:
        """Whether there is something new to tell."""
        if not self._ratios:
            self._began_s = now_s
        self._ratios.append(min(ratio, _MOST_RATIO))
        if len(self._ratios) < self.least_steps or now_s - self._began_s < LEAST_WINDOW_S:
            # A window of very many steps needs no more of them than say the same.
            del self._ratios[: max(0, len(self._ratios) - 8 * self.least_steps)]
            return False
        self._medians.append(statistics.median(self._ratios))
        self._ratios.clear()
        slower = all(each > self.told * (1 + _CHANGE) for each in self._medians)
        faster = all(each < self.told / (1 + _CHANGE) for each in self._medians)
        if len(self._medians) < _WINDOWS or not (slower or faster):
            return False
        self.told = statistics.median(self._medians)
        return True


class ServicePace:
    """Steps of one shard in service. `context_s` is what a token before a row adds to its time, for attention."""

    def __init__(self, loaded: StageSpeed, context_s: float) -> None:
        self._loaded = loaded
        self._context_s = context_s
        self._decode = _Windows(_LEAST_STEPS)
        self._prefill = _Windows(_LEAST_PROMPT_STEPS)

    def observe(self, rows: int, context_tokens: int, seconds: float, now_s: float) -> ShardPace | None:
        """A step of so many rows, behind so many tokens in all, took `seconds`. Returns the new pace where that has
        changed, None as long as it is what was told before."""
        expected_s = self._expected_s(rows)
        if expected_s is None or not seconds > 0:
            return None
        attention_s = context_tokens * self._context_s
        if attention_s > expected_s:
            return None  # long conversations say more of attention than of the machine
        windows = self._decode if rows <= BATCH_ROWS else self._prefill
        if not windows.add(seconds / (expected_s + attention_s), now_s):
            return None
        return ShardPace(self._decode.told, self._prefill.told)

    def _expected_s(self, rows: int) -> float | None:
        row_s, batch_s, prompt_row_s = self._loaded.row_s, self._loaded.batch_s, self._loaded.prompt_row_s
        if rows == 1:
            return row_s
        if 1 < rows <= BATCH_ROWS and batch_s is not None:
            return row_s + (batch_s - row_s) * (rows - 1) / (BATCH_ROWS - 1)
        if rows >= _LEAST_PROMPT_ROWS and prompt_row_s is not None:
            return prompt_row_s * rows
        return None
