"""Speeds of the lines between ranks, and the algorithm that they make the quickest.

Every rank must choose alike, so figures are exchanged after they were measured, and all ranks compute with the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardcompute.collectives.topology import Algorithm, Grid

Figures = npt.NDArray[np.float64]
FRAME_S = 10e-6
"""What a rank takes to send or receive one frame, besides the line."""
CROWDED_FRAME_S = 130e-6
"""The same where more ranks share a machine than it has cores: each frame that is waited for takes the system's turn
from one process to another. As measured with three and four ranks on two cores, by every algorithm."""


@dataclass(frozen=True, slots=True)
class LineSpeed:
    """The slowest line of a group: one way without load, bytes a second on top, and a rank's own part in a frame."""

    latency_s: float = 50e-6
    bytes_per_s: float = 1e9
    frame_s: float = FRAME_S

    def carry_s(self, size_bytes: float) -> float:
        return self.frame_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class LineSpeeds:
    """Between all ranks of a world, as `[from, to]`, and what each rank takes for a frame."""

    latency_s: Figures
    bytes_per_s: Figures
    frame_s: Figures

    def among(self, members: Sequence[int]) -> LineSpeed:
        """The slowest of what is between these ranks."""
        if len(members) < 2:
            return LineSpeed()
        chosen = np.ix_(members, members)
        off = ~np.eye(len(members), dtype=bool)
        return LineSpeed(
            float(self.latency_s[chosen][off].max()),
            float(self.bytes_per_s[chosen][off].min()),
            float(self.frame_s[list(members)].max()),
        )


def all_reduce_s(algorithm: Algorithm, size_bytes: int, ranks: int, grid: Grid, line: LineSpeed) -> float:
    """What an all-reduce of so many bytes takes, as far as lines and frames go."""
    doublings = (ranks - 1).bit_length()
    piece = line.carry_s(size_bytes / ranks)
    if algorithm is Algorithm.DIRECT:
        return line.latency_s + (ranks - 1) * line.carry_s(size_bytes)
    if algorithm is Algorithm.RING:
        return 2 * (ranks - 1) * (line.latency_s + piece)
    if algorithm is Algorithm.DOUBLING:
        return doublings * (line.latency_s + line.carry_s(size_bytes))
    if algorithm is Algorithm.TREE:
        return 2 * doublings * (line.latency_s + line.carry_s(size_bytes))
    along_row = (grid.columns - 1) * line.carry_s(size_bytes / grid.columns)
    down_column = (grid.rows - 1) * piece
    rounds = 2 * (grid.columns > 1) + 2 * (grid.rows > 1)
    return rounds * line.latency_s + 2 * (along_row + down_column)


def choose_all_reduce(size_bytes: int, ranks: int, grid: Grid, line: LineSpeed) -> Algorithm:
    """The one that is expected to be quickest; of two alike the simpler."""
    return min(Algorithm, key=lambda each: all_reduce_s(each, size_bytes, ranks, grid, line))


def choose_broadcast(ranks: int) -> Algorithm:
    """Not by size: only the root knows it."""
    return Algorithm.DIRECT if ranks <= 4 else Algorithm.TREE
