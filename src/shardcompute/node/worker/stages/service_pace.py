"""Service pace: how fast a shard's steps are against what was measured when it was loaded. Pure; no clock.

A card that throttles, or that a game shares, is slower for as long as that lasts. A window of many steps says what they
take of late; how many of these have to agree before anything else is believed is the coordinator's to decide.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from shardcompute.node.worker.speed_probe import BATCH_ROWS, StageSpeed

LEAST_WINDOW_S = 5.0
_LEAST_STEPS = 24
_LEAST_PROMPT_STEPS = 6
_LEAST_PROMPT_ROWS = 32
_MOST_RATIO = 1000.0


@dataclass(frozen=True, slots=True)
class ShardPace:
    """By how much decoding, and prompts, took longer in a window than was measured; 1: as long; None: too few did to
    say."""

    decode: float | None = None
    prefill: float | None = None


@dataclass(slots=True)
class _StepWindow:
    """The ratios of one kind of steps."""

    least_steps: int
    _ratios: list[float] = field(default_factory=list)
    _began_s: float = 0.0

    def add(self, ratio: float, now_s: float) -> float | None:
        """The median, where the window ends with this one."""
        if not self._ratios:
            self._began_s = now_s
        self._ratios.append(min(ratio, _MOST_RATIO))
        if len(self._ratios) < self.least_steps or now_s - self._began_s < LEAST_WINDOW_S:
            # A window of very many steps needs no more of them than say the same.
            del self._ratios[: max(0, len(self._ratios) - 8 * self.least_steps)]
            return None
        found = statistics.median(self._ratios)
        self._ratios.clear()
        return found


class ServicePace:
    """Steps of one shard in service. `context_s` is what a token before a row adds to its time, for attention."""

    def __init__(self, loaded: StageSpeed, context_s: float) -> None:
        self._loaded = loaded
        self._context_s = context_s
        self._decode = _StepWindow(_LEAST_STEPS)
        self._prefill = _StepWindow(_LEAST_PROMPT_STEPS)

    def observe(self, rows: int, context_tokens: int, seconds: float, now_s: float) -> ShardPace | None:
        """A step of so many rows, behind so many tokens in all, took `seconds`. Returns the pace of a window that ends
        with it, else None."""
        expected_s = self._expected_s(rows)
        if expected_s is None or not seconds > 0:
            return None
        attention_s = context_tokens * self._context_s
        if attention_s > expected_s:
            return None  # long conversations say more of attention than of the machine
        ratio = seconds / (expected_s + attention_s)
        if rows <= BATCH_ROWS:
            decode = self._decode.add(ratio, now_s)
            return None if decode is None else ShardPace(decode=decode)
        prefill = self._prefill.add(ratio, now_s)
        return None if prefill is None else ShardPace(prefill=prefill)

    def _expected_s(self, rows: int) -> float | None:
        row_s, batch_s, prompt_row_s = self._loaded.row_s, self._loaded.batch_s, self._loaded.prompt_row_s
        if rows == 1:
            return row_s
        if 1 < rows <= BATCH_ROWS and batch_s is not None:
            return row_s + (batch_s - row_s) * (rows - 1) / (BATCH_ROWS - 1)
        if rows >= _LEAST_PROMPT_ROWS and prompt_row_s is not None:
            return prompt_row_s * rows
        return None
