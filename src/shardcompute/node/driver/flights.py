"""Flights: the frames of a driver that are under way, and when they are looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardcompute.core.effects import CallLater, Countdown, EffectQueue
from shardcompute.core.steps import Frame
from shardcompute.node.driver.generation import Flight, Landing
from shardcompute.node.rpc.step_times import Patience, StepDeadlines
from shardcompute.wire import StageTiming

_LATE_S = 1.0


class Flights:
    """By the sequence numbers of frames. Not safe for threads: whoever owns it decides under a lock."""

    def __init__(self, patience: Patience) -> None:
        self._flights: dict[int, Flight] = {}
        self._deadlines = StepDeadlines(patience)
        self.last_sent = 0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def computing(self) -> int:
        """How many keep the chain busy: those that show pictures wait for a tower most of their time, beside the
        others."""
        return sum(not flight.frame.patches for flight in self._flights.values())

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._flights

    def depart(self, frame: Frame, now_s: float) -> None:
        self._flights[frame.sequence] = Flight(frame, now_s)
        # To look at a patch takes about as long as a row: what it takes more is allowed for many times over.
        self._deadlines.sent(frame.sequence, frame.rows + frame.patches, now_s)
        self.last_sent = frame.sequence

    def land(
        self, sequence: int, timings: Sequence[StageTiming], now_s: float
    ) -> tuple[Frame, Landing] | None:
        """The frame whose results are here, and how it fared; None: nobody waits for it."""
        flight = self._flights.pop(sequence, None)
        if flight is None:
            return None
        landing = flight.landed(now_s, timings)
        self._deadlines.landed(sequence, landing.seconds, landing.queue_s)
        return flight.frame, landing

    def drop(self, sequence: int) -> Frame | None:
        """Its results will not come, or do not count; None: nobody waits for them."""
        flight = self._flights.pop(sequence, None)
        self._deadlines.drop(sequence)
        return flight.frame if flight is not None else None

    def clear(self) -> None:
        """Nothing that is under way counts any more."""
        self._flights.clear()
        self._deadlines.clear()

    def before(self, frame: Frame) -> list[Frame]:
        """Frames with rows of the same sessions that were sent earlier and have not come back."""
        sessions = {part.session for part in frame.work}
        return [
            flight.frame
            for sequence, flight in self._flights.items()
            if sequence < frame.sequence and any(part.session in sessions for part in flight.frame.work)
        ]

    def next_look_s(self, now_s: float) -> float | None:
        """In how many seconds a frame is overdue; None: nothing is under way."""
        return self._deadlines.next_look_s(now_s)

    def overdue(self, now_s: float) -> Iterator[tuple[Frame, float, float]]:
        """Frames to look for now, how long each has been under way, and how long it was allowed to be."""
        for late in self._deadlines.overdue(now_s):
            flight = self._flights.get(late.sequence)
            if flight is not None:
                yield flight.frame, late.waited_s, late.allowed_s


class Lookout:
    """Calls `look`, which asks `is_due`, when the first of what is awaited is overdue. One timer lasts for many frames:
    it is set anew only where it would come clearly too late. Timers start and stop as `effects`, outside of the
    owner's lock."""

    def __init__(
        self, look: Callable[[Countdown], None], effects: EffectQueue, call_later: CallLater
    ) -> None:
        self._look = look
        self._effects = effects
        self._call_later = call_later
        self._countdown: Countdown | None = None
        self._look_s = 0.0

    def expect(self, wait_s: float, now_s: float) -> None:
        """Look in `wait_s`, or at most a second later."""
        if self._countdown is not None and self._look_s <= now_s + wait_s + _LATE_S:
            return
        self.stop()
        self._countdown = Countdown(wait_s, self._look, self._call_later)
        self._look_s = now_s + wait_s
        self._effects.put(self._countdown.start)

    def stop(self) -> None:
        if self._countdown is not None:
            self._effects.put(self._countdown.stop)
            self._countdown = None

    def is_due(self, countdown: Countdown) -> bool:
        """Whether this is the countdown that was waited for, which it then is no longer."""
        if self._countdown is not countdown:
            return False
        self._countdown = None
        return True
