"""Packet forwarding of a switch, without any device: who gets them, and when.

A packet waits for its sender's uplink, travels for the path's delay (and jitter), then waits for its receiver's
downlink. It is dropped where a path is cut, where chance says so, and where a queue is full. Packets between two
machines never overtake each other.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from shardcompute.sim.conditions import Conditions, Path
from shardcompute.sim.lines import Line

# A timer is never exact to the microsecond; what is due so soon goes along.
_EARLY_S = 3e-5


@dataclass(slots=True)
class Counts:
    """What became of packets."""

    taken: int = 0
    delivered: int = 0
    lost: int = 0
    overflowed: int = 0
    refused: int = 0
    """Came while the path was cut."""


class Forwarding:
    """Machines are known by their index in the conditions."""

    def __init__(self, conditions: Conditions, chance: random.Random | None = None) -> None:
        self.counts = Counts()
        self._chance = (chance or random.Random()).random
        self._paths = conditions.paths
        self._uplinks = [Line(port.uplink_bytes_per_s, port.queue_s) for port in conditions.ports]
        self._downlinks = [Line(port.downlink_bytes_per_s, port.queue_s) for port in conditions.ports]
        size = len(conditions.machines)
        # When the last packet of each pair arrives: the next may not come before it.
        self._last_s = [[0.0] * size for _ in range(size)]
        self._number = 0
        self._waiting: list[tuple[float, int, int, bytes, bool]] = []
        """(when, tie-breaker, receiver, packet, whether it has passed the downlink's queue)"""

    def reconfigure(self, conditions: Conditions, now_s: float) -> None:
        self._paths = conditions.paths
        for index, port in enumerate(conditions.ports):
            self._uplinks[index].retune(port.uplink_bytes_per_s, port.queue_s, now_s)
            self._downlinks[index].retune(port.downlink_bytes_per_s, port.queue_s, now_s)

    def take(self, source: int, target: int, packet: bytes, now_s: float) -> None:
        """A packet leaves its machine."""
        counts = self.counts
        counts.taken += 1
        path: Path = self._paths[source][target]
        if path.is_cut:
            counts.refused += 1
            return
        out_s = self._uplinks[source].admit(now_s, len(packet))
        if out_s is None:
            counts.overflowed += 1
            return
        # Lost behind the uplink, whose time it has used.
        if path.loss and self._chance() < path.loss:
            counts.lost += 1
            return
        arrival_s = out_s + path.delay_s
        if path.jitter_s:
            arrival_s += self._chance() * path.jitter_s
        last = self._last_s[source]
        if arrival_s < last[target]:
            arrival_s = last[target]
        last[target] = arrival_s
        self._push(arrival_s, target, packet, has_passed=False)

    def release(self, now_s: float) -> list[tuple[int, bytes]]:
        """Packets that have arrived by now, with their receivers, in order."""
        arrived: list[tuple[int, bytes]] = []
        waiting, until_s = self._waiting, now_s + _EARLY_S
        while waiting and waiting[0][0] <= until_s:
            when_s, _, target, packet, has_passed = heapq.heappop(waiting)
            if not has_passed:
                line = self._downlinks[target]
                through_s = line.admit(when_s, len(packet))
                if through_s is None:
                    self.counts.overflowed += 1
                    continue
                # Handed over as its first byte comes out, so that a line as wide as the sender's adds nothing.
                first_s = through_s - len(packet) / line.bytes_per_s
                if first_s > until_s:
                    self._push(first_s, target, packet, has_passed=True)
                    continue
            self.counts.delivered += 1
            arrived.append((target, packet))
        return arrived

    def next_s(self) -> float | None:
        """When to look again."""
        return self._waiting[0][0] if self._waiting else None

    def _push(self, when_s: float, target: int, packet: bytes, *, has_passed: bool) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (when_s, self._number, target, packet, has_passed))
