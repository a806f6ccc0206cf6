"""Inbox of a rank: whole frames by peer, put in by threads, taken out by the one that computes.

Bounded: who puts in more frames than there is room for waits until some were taken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from shardcompute.collectives.fabrics.fabric import (
    ExpectedFrame,
    PeerAbortedError,
    PeerFailedError,
    frame_space,
    judge_head,
    read_reason,
)
from shardcompute.collectives.fabrics.frames import HEAD_BYTES, FrameKind

_MOST_FRAMES = 256


class Inbox:
    """`put` and `fail` from any thread, `take` from one. It outlives worlds: opened again under a higher epoch it
    still holds what came late for an earlier one, and refuses it."""

    def __init__(self, peers: Iterable[int], epoch: int = 0) -> None:
        self._frames: dict[int, deque[memoryview]] = {peer: deque() for peer in peers}
        self._failures: dict[int, str] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._epoch = epoch
        self.refused_frames = 0
        """Frames of earlier epochs, which nobody wants any more."""

    def open(self, epoch: int) -> None:
        with self._changed:
            self._epoch = epoch
            self._failures.clear()
            self._is_closed = False

    def put(self, peer: int, frame: memoryview, deadline: float) -> bool:
        """False if there was no room until `deadline`."""
        with self._changed:
            waiting = self._frames[peer]
            has_room = self._changed.wait_for(
                lambda: len(waiting) < _MOST_FRAMES, max(0.0, deadline - time.monotonic())
            )
            if has_room:
                waiting.append(frame)
                self._changed.notify_all()
            return has_room

    def fail(self, peer: int, reason: str, epoch: int) -> None:
        """Nothing more comes from this peer in this epoch; what has come is still taken."""
        with self._changed:
            if epoch >= self._epoch:
                self._failures.setdefault(peer, reason)
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self, receives: Sequence[ExpectedFrame], deadline: float) -> None:
        """Fill in all that must come, in the order in which it comes."""
        for receive in receives:
            while not self._fill(receive, self._next(receive.peer, deadline)):
                self.refused_frames += 1

    def _next(self, peer: int, deadline: float) -> memoryview:
        with self._changed:
            waiting = self._frames[peer]
            self._changed.wait_for(
                lambda: waiting or peer in self._failures or self._is_closed,
                max(0.0, deadline - time.monotonic()),
            )
            if waiting:
                self._changed.notify_all()
                return waiting.popleft()
            if peer in self._failures:
                raise PeerFailedError(peer, self._failures[peer], hint="the rank may have stopped")
            if self._is_closed:
                raise PeerFailedError(peer, "the world was closed here")
            raise PeerFailedError(
                peer, "it did not answer in time", hint="the rank may be stuck or cut off", is_late=True
            )

    def _fill(self, receive: ExpectedFrame, frame: memoryview) -> bool:
        """False for a frame of an earlier epoch."""
        if len(frame) < HEAD_BYTES:
            raise PeerFailedError(receive.peer, f"a frame of {len(frame)} bytes has no head")
        raw, body = frame[:HEAD_BYTES], frame[HEAD_BYTES:]
        if receive.body is None or raw != receive.expected:
            head = judge_head(raw, receive)
            if head is None:
                return False
            if len(body) != head.body_bytes:
                raise PeerFailedError(
                    receive.peer, f"{head.body_bytes} bytes were announced and {len(body)} came"
                )
            if head.kind == FrameKind.ABORT:
                raise PeerAbortedError(head.rank, read_reason(body))
            space = frame_space(head, receive)
        else:
            space = receive.body
        if len(body) != len(space):
            raise PeerFailedError(receive.peer, f"{len(space)} bytes were announced and {len(body)} came")
        if len(body):
            space[:] = body
        return True
