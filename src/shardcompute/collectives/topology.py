"""Named topologies: along which lines a collective travels, where that is not left to measurement.

`auto`, or one of `direct`, `ring`, `doubling`, `tree`, `mesh`; `mesh=2x3` names the grid, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from shardcompute.core.errors import UsageError


class Algorithm(StrEnum):
    DIRECT = "direct"
    RING = "ring"
    DOUBLING = "doubling"
    TREE = "tree"
    MESH = "mesh"


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks in rows: rank = row · columns + column."""

    rows: int
    columns: int

    def place(self, rank: int) -> tuple[int, int]:
        return divmod(rank, self.columns)

    def row(self, row: int) -> list[int]:
        return list(range(row * self.columns, (row + 1) * self.columns))

    def column(self, column: int) -> list[int]:
        return list(range(column, self.rows * self.columns, self.columns))


def nearest_grid(size: int) -> Grid:
    """The squarest grid; of two alike the one whose rows are a power of two long, whose sums are nodes of the tree."""
    grids = [Grid(size // columns, columns) for columns in range(1, size + 1) if size % columns == 0]
    return min(
        grids, key=lambda grid: (grid.rows + grid.columns, grid.columns & (grid.columns - 1), grid.rows)
    )


@dataclass(frozen=True, slots=True)
class TopologyChoice:
    """`algorithm` None: whatever is expected to be quickest."""

    algorithm: Algorithm | None = None
    grid: Grid | None = None

    def grid_for(self, size: int) -> Grid:
        return self.grid or nearest_grid(size)

    def check(self, size: int) -> None:
        """`UsageError` where so many ranks cannot be laid out so."""
        if self.grid is not None and self.grid.rows * self.grid.columns != size:
            raise UsageError(
                f"a grid of {self.grid.rows} × {self.grid.columns} is not for {size} ranks",
                hint="name a grid with as many places as ranks, or just mesh",
            )


AUTO = TopologyChoice()


def parse_topology(text: str) -> TopologyChoice:
    if text in ("", "auto"):
        return AUTO
    name, _, grid = text.partition("=")
    if name in tuple(Algorithm) and not grid and "=" not in text:
        return TopologyChoice(Algorithm(name))
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", grid)
    if name == Algorithm.MESH and found:
        return TopologyChoice(Algorithm.MESH, Grid(int(found[1]), int(found[2])))
    raise UsageError(
        f"there is no topology {text!r}",
        hint=f"use auto, {', '.join(Algorithm)}, or mesh with its grid, such as mesh=2x3",
    )
