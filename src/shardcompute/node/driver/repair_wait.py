"""Waiting for a lost chain: for as long as its repair comes further, and not much longer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from shardcompute.core.effects import CallLater, Countdown, EffectQueue
from shardcompute.core.errors import CapacityError, ShardComputeError
from shardcompute.core.units import format_seconds

QUIET_S = 1200.0
"""So long a session waits for a chain whose repair comes no further: longer than the coordinator waits for layers that
do not arrive before it has others load them. While weights arrive it waits for as long as that takes."""
_NO_PROGRESS = (0, -1.0)


class RepairWait:
    """Ends with `give_up` where a repair stands still. Its owner calls it under the lock that `deciding` takes, as does
    whatever it calls later itself; timers start and stop as `effects`, outside of that."""

    def __init__(
        self,
        quiet_s: float,
        give_up: Callable[[ShardComputeError], None],
        deciding: Callable[[], AbstractContextManager[None]],
        effects: EffectQueue,
        call_later: CallLater,
        clock: Callable[[], float],
    ) -> None:
        self._quiet_s = quiet_s
        self._give_up = give_up
        self._deciding = deciding
        self._effects = effects
        self._call_later = call_later
        self._clock = clock
        self._repair: Countdown | None = None
        """Runs while the chain is lost."""
        self._ultimatum: Countdown | None = None
        """Runs while nobody repairs it."""
        self._progress = _NO_PROGRESS
        self._progress_s = 0.0
        """How far the repair is, and when it came there."""
        self.waits_for = ""

    def begin(self) -> None:
        """The chain is lost."""
        if self._repair is None:
            self._progress_s = self._clock()
            self._wait(self._quiet_s)

    def progressed(self, progress: tuple[int, float], waits_for: str) -> None:
        """The epoch that is loaded, which fraction of it is there, and what is missing in words."""
        self.waits_for = waits_for
        if progress > self._progress:
            self._progress, self._progress_s = progress, self._clock()
            self._drop_ultimatum()

    def give_up_after(self, seconds: float, error: ShardComputeError) -> None:
        """With this error, unless the repair comes further before; an earlier such word stands."""
        if self._ultimatum is None:
            self._ultimatum = Countdown(
                seconds, lambda countdown: self._end_ultimatum(countdown, error), self._call_later
            )
            self._effects.put(self._ultimatum.start)

    def end(self) -> None:
        """There is a chain, or none is wanted any more."""
        self._drop_ultimatum()
        self._progress, self.waits_for = _NO_PROGRESS, ""
        if self._repair is not None:
            self._effects.put(self._repair.stop)
            self._repair = None

    def _wait(self, seconds: float) -> None:
        self._repair = Countdown(seconds, self._look, self._call_later)
        self._effects.put(self._repair.start)

    def _look(self, repair: Countdown) -> None:
        with self._deciding():
            if self._repair is not repair:
                return
            quiet_s = self._clock() - self._progress_s
            if quiet_s < self._quiet_s:
                self._wait(self._quiet_s - quiet_s)
                return
            # Whoever asks from now on waits as long.
            self._progress_s = self._clock()
            self._wait(self._quiet_s)
            self._give_up(
                CapacityError(
                    f"a machine was lost, and the repair of its chain has come no further for "
                    f"{format_seconds(self._quiet_s)}: {self.waits_for or 'no machine loads what is missing'}",
                    hint="`shardcompute status` says what it waits for; ask again when that is there",
                )
            )

    def _end_ultimatum(self, countdown: Countdown, error: ShardComputeError) -> None:
        with self._deciding():
            if self._ultimatum is countdown:
                self._ultimatum = None
                self._give_up(error)

    def _drop_ultimatum(self) -> None:
        if self._ultimatum is not None:
            self._effects.put(self._ultimatum.stop)
            self._ultimatum = None
