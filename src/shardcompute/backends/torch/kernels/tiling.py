"""How the work of a skinny matrix product is cut into programs. Depends on the matrix alone, never on the rows."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """Outputs and inputs per tile, parts along the input, warps and pipeline stages of a program.

    `swap` makes the weights the tall side of the product; `prefetch` is how many lines of 128 bytes of each of its
    weight rows a program asks for while the kernel before it still runs.
    """

    block_n: int
    block_k: int
    split: int
    warps: int = 4
    stages: int = 4
    swap: bool = True
    prefetch: int = 0


def choose_tiling(width_out: int, width_in: int, is_gated: bool, processors: int) -> Tiling:
    """Enough programs to fill the chip about twice, none with less than four tiles of input to walk."""
    block_n = 64
    tiles = -(-width_out // block_n)
    block_k = 128 if width_in >= 512 else 64
    split = 1
    while tiles * split < 2 * processors and width_in >= 8 * split * block_k:
        split *= 2
    return Tiling(block_n, block_k, split)


def pad_rows(rows: int) -> int:
    """Rows of the tile that holds so many."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64
