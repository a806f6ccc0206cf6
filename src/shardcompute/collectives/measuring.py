"""Measuring the lines between ranks, two at a time, and telling all ranks what was found."""

from __future__ import annotations

import statistics
import time

import numpy as np

from shardcompute.collectives.fabric_group import FabricGroup
from shardcompute.collectives.group import Array
from shardcompute.collectives.line_speeds import LineSpeeds
from shardcompute.core.errors import CollectiveError

_LARGE = np.zeros(1 << 18, np.uint8)
_PROBES = ((np.zeros(1, np.uint8), 9), (_LARGE, 3))
"""What goes there and back, and how often."""
_LEAST_S = 1e-7


def measure_lines(group: FabricGroup) -> LineSpeeds:
    """Of a world's group; every rank calls it, and from then on all choose algorithms by the same figures."""
    latency_s = np.zeros(group.size)
    bytes_per_s = np.full(group.size, np.inf)
    for first in range(group.size):
        for second in range(first + 1, group.size):
            if group.rank == first:
                latency_s[second], bytes_per_s[second] = _measure(group, second)
            elif group.rank == second:
                _answer(group, first)
    frame_s = np.full(group.size, group.world.frame_s)
    gathered = group.all_gather(np.stack([latency_s, bytes_per_s, frame_s]))
    for rank, figures in enumerate(gathered):
        if figures.shape != (3, group.size) or not (figures >= 0).all():
            group.abort(f"rank {rank} tells no speeds of its lines")
            raise CollectiveError(
                f"rank {rank} tells no speeds of its lines",
                hint="run the same release on every rank",
                rank=rank,
            )
    # Measured by the lower of two ranks, true for both.
    found_s, found_bytes = np.stack([each[0] for each in gathered]), np.stack([each[1] for each in gathered])
    frames_s = np.array([each[2][0] for each in gathered])
    speeds = LineSpeeds(np.maximum(found_s, found_s.T), np.minimum(found_bytes, found_bytes.T), frames_s)
    group.world.speeds = speeds
    group.measured(speeds)
    return speeds


def _measure(group: FabricGroup, other: int) -> tuple[float, float]:
    """Latency one way without load, and bytes a second on top of it: the middle of a few turns each. The best of them
    would be a line that calls rarely meet, where its delays vary, and would make many rounds look cheap."""
    small_s, large_s = (
        statistics.median(_round_trip_s(group, other, array) for _ in range(turns))
        for array, turns in _PROBES
    )
    return small_s / 2, 2 * _LARGE.nbytes / max(large_s - small_s, _LEAST_S)


def _answer(group: FabricGroup, other: int) -> None:
    for _, turns in _PROBES:
        for _ in range(turns):
            group.send(group.receive(other), other)


def _round_trip_s(group: FabricGroup, other: int, array: Array) -> float:
    started_s = time.perf_counter()
    group.send(array, other)
    group.receive(other)
    return time.perf_counter() - started_s
