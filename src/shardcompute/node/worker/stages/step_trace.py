"""Step trace: where the frames are that came to this worker lately, and what the thread that computes is at.

Written by links and by the computing thread, read by whoever asks: a step that hangs does not keep the worker from
saying so.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from shardcompute.node.rpc.commands import StepPlace, StepTraced, TraceStep
from shardcompute.node.rpc.frames import REPLAY
from shardcompute.node.rpc.session_ids import namespace_of
from shardcompute.wire import StepFrame

_MOST_FRAMES = 512
"""Of each sender: more than any has under way."""
_MOST_SENDERS = 64
Key = tuple[str, int, int, int]
"""(chain, epoch, namespace of the driver's sessions, number of the frame)"""


class StepTrace:
    """Methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._places: OrderedDict[str, OrderedDict[Key, StepPlace]] = OrderedDict()
        self._busy_since_s: float | None = None
        self._limit_s = 0.0
        self._done = 0

    def place(self, frame: StepFrame, sender: str, place: StepPlace) -> None:
        """A frame that this node sent has come so far."""
        if frame.sequence == REPLAY:
            return
        with self._lock:
            frames = self._places.setdefault(sender, OrderedDict())
            self._places.move_to_end(sender)
            key = _key_of(frame)
            if place in ("queued", "dropped") and frames.get(key) in ("sent", "failed"):
                return  # the same frame once more: the first has had its answer
            frames[key] = place
            if len(frames) > _MOST_FRAMES:
                frames.popitem(last=False)
            if len(self._places) > _MOST_SENDERS:
                self._places.popitem(last=False)

    @contextlib.contextmanager
    def busy(self, limit_s: float) -> Iterator[None]:
        """The computing thread is at something that takes no longer than this, unless it is stuck."""
        with self._lock:
            self._busy_since_s, self._limit_s = self._clock(), limit_s
        try:
            yield
        finally:
            with self._lock:
                self._busy_since_s = None
                self._done += 1

    def advance(self) -> None:
        """What the computing thread is at goes on: a part of it is done."""
        with self._lock:
            self._done += 1
            if self._busy_since_s is not None:
                self._busy_since_s = self._clock()

    def find(self, command: TraceStep) -> StepTraced:
        key = (command.chain, command.epoch, command.session_namespace, command.sequence)
        with self._lock:
            frames = self._places.get(command.sender)
            place = None if frames is None else frames.get(key)
        return self.look(place or "away")

    def look(self, place: StepPlace = "away") -> StepTraced:
        """How the computing thread is getting on."""
        with self._lock:
            since_s = self._busy_since_s
            busy_s = 0.0 if since_s is None else self._clock() - since_s
            return StepTraced(place, busy_s, self._limit_s, self._done)


def _key_of(frame: StepFrame) -> Key:
    return (frame.chain, frame.epoch, namespace_of(frame.segments[0].session), frame.sequence)
