"""An emulated LAN between ranks on one machine: a frame comes when a line of so much delay and rate would bring it.

When frames leave is noted in a file that all ranks have mapped, by the sender's clock; whoever receives one lets its
own clock come to when it would have arrived. That adds no thread, no copy and no system call to what ranks do anyway.
The line may change between calls.

There are two clocks. `WallClock` waits, and takes ranks as they run. `WorkClock` counts what a rank computes, in
processor time, and what it would wait for others: as if every rank had a core to itself and nothing else ran, however
many ranks there are and whatever else runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardcompute.collectives.fabrics.fabric import ExpectedFrame, Fabric, OutgoingFrame
from shardcompute.sim.lines import Line

_SLOTS = 4096
"""Frames of one rank for another that may be on their way."""
_FIGURES = 2
_ALERT_S = 150e-6
"""Sleepers wake late by up to so much: the last of a wait is spent awake."""


Kind = tuple[int, int, int]
"""How many frames an exchange sends and receives, and their bytes."""


class LanClock(Protocol):
    def now_s(self) -> float: ...

    def wait_until(self, due_s: float) -> None:
        """Nothing, where that is past."""

    def exchanged(self, began_s: float, kind: Kind) -> None:
        """An exchange of this kind has gone over the fabric since `began_s`."""


class WallClock:
    """One clock for all processes of a machine."""

    def exchanged(self, began_s: float, kind: Kind) -> None:
        """What it took is what it takes."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait_until(self, due_s: float) -> None:
        while (left_s := due_s - time.monotonic()) > 0:
            if left_s > _ALERT_S:
                time.sleep(left_s - _ALERT_S)


class WorkClock:
    """A rank's own: what its thread has computed, and what it has waited for. Whoever hears from a rank that is ahead
    comes up to it, so that ranks agree after they have met. Of one thread, which must not look for frames in vain.

    Sending and receiving count as the least that an exchange of the kind has taken so far: what else runs, and the
    system's turns from one process to another, only ever add to it.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._least_s: dict[Kind, float] = {}

    def now_s(self) -> float:
        return time.thread_time() + self._waited_s

    def wait_until(self, due_s: float) -> None:
        self._waited_s += max(0.0, due_s - self.now_s())

    def exchanged(self, began_s: float, kind: Kind) -> None:
        took_s = self.now_s() - began_s
        least_s = self._least_s[kind] = min(took_s, self._least_s.get(kind, took_s))
        self._waited_s -= took_s - least_s


@dataclass(frozen=True, slots=True)
class LanNotes:
    """What all ranks of an emulated LAN have mapped: its delay one way and rate, and when frames arrive."""

    figures: npt.NDArray[np.float64]
    arrivals_s: npt.NDArray[np.float64]
    """`[from, to, frame]`."""

    @classmethod
    def open(cls, path: Path, ranks: int) -> LanNotes:
        """Made where it is not there yet: a line without delay."""
        count = _FIGURES + ranks * ranks * _SLOTS
        if not path.exists():
            path.write_bytes(bytes(8 * count))
        whole = np.memmap(path, np.float64, "r+", shape=(count,))
        return cls(whole[:_FIGURES], whole[_FIGURES:].reshape(ranks, ranks, _SLOTS))

    def become(self, rtt_ms: float, mbit: float) -> None:
        """From the next frame on; a round trip of 0 is no LAN at all, but what the machine itself takes."""
        self.figures[:] = rtt_ms / 2e3, mbit * 1e6 / 8


class LanFabric:
    """Another fabric, as if it were that LAN (see `Fabric`)."""

    def __init__(self, fabric: Fabric, notes: LanNotes, clock: LanClock) -> None:
        self.rank, self.size, self.epoch = fabric.rank, fabric.size, fabric.epoch
        self.clock = clock
        self.spent_s = 0.0
        """In exchanges, by the clock."""
        self._fabric = fabric
        self._notes = notes
        self._up, self._down = Line(1.0, 0.0), Line(1.0, 0.0)
        self._sent = [0] * fabric.size
        self._received = [0] * fabric.size

    def exchange(
        self, sends: Sequence[OutgoingFrame], receives: Sequence[ExpectedFrame], deadline: float
    ) -> None:
        delay_s, self._up.bytes_per_s = map(float, self._notes.figures)
        began_s = self.clock.now_s()
        for send in sends:
            gone_s = self._up.append(began_s, len(send.head) + len(send.body)) if delay_s else 0.0
            self._notes.arrivals_s[self.rank, send.peer, self._sent[send.peer] % _SLOTS] = gone_s + delay_s
            self._sent[send.peer] += 1
        self._fabric.exchange(sends, receives, deadline)
        size_bytes = sum(len(send.body) for send in sends) + sum(map(_body_bytes, receives))
        self.clock.exchanged(began_s, (len(sends), len(receives), size_bytes))
        # The line may have become another one while this rank had nothing to do.
        delay_s, rate = map(float, self._notes.figures)
        self._down.bytes_per_s = rate
        due_s = 0.0
        for receive in receives:
            peer = receive.peer
            there_s = float(self._notes.arrivals_s[peer, self.rank, self._received[peer] % _SLOTS])
            self._received[peer] += 1
            if delay_s:
                # Received while it is being sent: alone it needs no more time, beside others it waits for them.
                frame_bytes = len(receive.expected) + _body_bytes(receive)
                due_s = max(due_s, there_s, self._down.append(there_s - frame_bytes / rate, frame_bytes))
        self.clock.wait_until(due_s)
        self.spent_s += self.clock.now_s() - began_s

    def end(self, farewell: bytes) -> None:
        self._fabric.end(farewell)

    def interrupt(self) -> None:
        self._fabric.interrupt()

    def close(self) -> None:
        self._fabric.close()


def _body_bytes(receive: ExpectedFrame) -> int:
    if receive.body is not None:
        return len(receive.body)
    return 0 if receive.array is None else receive.array.nbytes
