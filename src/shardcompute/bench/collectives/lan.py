"""An emulated LAN between ranks on one machine: a frame comes when a line of so much delay and rate would bring it.

When frames leave is noted in a file that all ranks have mapped; whoever receives one waits for the rest of its time.
That adds no thread, no copy and no system call to what ranks do anyway, so that a tenth of a millisecond can be told
from two. The line may change between calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardcompute.collectives.fabrics.fabric import ExpectedFrame, Fabric, OutgoingFrame
from shardcompute.sim.lines import Line

_SLOTS = 4096
"""Frames of one rank for another that may be on their way."""
_FIGURES = 2
_ALERT_S = 150e-6
"""Sleepers wake late by up to so much: the last of a wait is spent awake."""


@dataclass(frozen=True, slots=True)
class LanNotes:
    """What all ranks of an emulated LAN have mapped: its delay one way and rate, and when frames arrive."""

    figures: npt.NDArray[np.float64]
    arrivals_s: npt.NDArray[np.float64]
    """`[from, to, frame]`, by `time.monotonic`, which is one clock for the processes of a machine."""

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

    def __init__(self, fabric: Fabric, notes: LanNotes) -> None:
        self.rank, self.size, self.epoch = fabric.rank, fabric.size, fabric.epoch
        self._fabric = fabric
        self._notes = notes
        self._up, self._down = Line(1.0, 0.0), Line(1.0, 0.0)
        self._sent = [0] * fabric.size
        self._received = [0] * fabric.size

    def exchange(
        self, sends: Sequence[OutgoingFrame], receives: Sequence[ExpectedFrame], deadline: float
    ) -> None:
        delay_s, self._up.bytes_per_s = map(float, self._notes.figures)
        now_s = time.monotonic()
        for send in sends:
            gone_s = self._up.append(now_s, len(send.head) + len(send.body)) if delay_s else 0.0
            self._notes.arrivals_s[self.rank, send.peer, self._sent[send.peer] % _SLOTS] = gone_s + delay_s
            self._sent[send.peer] += 1
        self._fabric.exchange(sends, receives, deadline)
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
                size_bytes = len(receive.expected) + _body_bytes(receive)
                due_s = max(due_s, there_s, self._down.append(there_s - size_bytes / rate, size_bytes))
        _wait_until(due_s)

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


def _wait_until(due_s: float) -> None:
    while (left_s := due_s - time.monotonic()) > 0:
        if left_s > _ALERT_S:
            time.sleep(left_s - _ALERT_S)
