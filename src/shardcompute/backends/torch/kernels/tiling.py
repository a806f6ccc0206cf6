"""How the work of a skinny matrix product is cut into programs.

The cut along the input depends on the matrix and the chip alone, never on the rows, so that every row is summed
in the same order in any batch. Measured on an H200 over the matrices of an 8B model: tiles of 64 outputs and 128
inputs, the weights as the tall side of the product, read at 84 % (all of a decode step) to 100 % (the head) of
copy bandwidth; what mattered was that the programs fill whole waves of processors and keep enough in flight. Quantised
weights want small programs, three for each processor; asking for their lines ahead made them slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_ROWS = 256
PREFETCH_LINES = 4
_LINE_VALUES = 64
_GOOD_FILL = 0.84


@dataclass(frozen=True, slots=True)
class Tiling:
    """Outputs and inputs per tile, parts along the input, warps and pipeline stages of a program.

    `prefetch` is how many lines of 128 bytes of each of its weight rows a program asks for while the kernel
    before it still runs.
    """

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int
    prefetch: int

    def part_inputs(self, width_in: int) -> int:
        """Inputs that one part sums up."""
        return math.ceil(math.ceil(width_in / self.block_k) / self.split) * self.block_k


def choose_tiling(
    rows: int, width_out: int, width_in: int, *, is_gated: bool, processors: int, shared_bytes: int
) -> Tiling:
    """`rows` is that of a tile; `shared_bytes` is what one program may have of a processor's shared memory."""
    block_n, block_k = 64, 128 if width_in >= 512 else 64
    tiles = -(-width_out // block_n)
    split = _choose_split(tiles, -(-width_in // block_k), processors)
    if rows > 64:
        # Arithmetic takes as long as reading: larger tiles.
        # Parts of the input must not move: tiles of half the inputs need parts of an even number of them.
        block_k = 64 if width_in % (split * block_k) == 0 else block_k
        block_n, warps, stages = (128, 8, 3) if split == 1 and width_out % 128 == 0 else (64, 4, 4)
        stages = _fitting(stages, block_k * (block_n * (4 if is_gated else 2) + 2 * rows), shared_bytes)
        return Tiling(block_n, block_k, split, warps, stages, 0)
    per_processor = -(-tiles * split // processors)
    stages = 8 if per_processor == 1 else 3 if per_processor == 3 else 4
    stages = _fitting(stages, block_k * (block_n * (4 if is_gated else 2) + 2 * rows), shared_bytes)
    has_lines = width_in // split >= PREFETCH_LINES * _LINE_VALUES and width_in % block_k == 0
    return Tiling(block_n, block_k, split, 4, stages, PREFETCH_LINES if has_lines else 0)


def choose_block_tiling(
    rows: int,
    width_out: int,
    groups: int,
    *,
    bits: int,
    block_size: int,
    is_gated: bool,
    processors: int,
    shared_bytes: int,
) -> Tiling:
    """For quantised weights: a tile along the input is a group of blocks."""
    block_n, block_k = 64, block_size * 16 // bits
    tiles = -(-width_out // block_n)
    splits = [split for split in (1, 2, 4, 8) if split == 1 or groups >= 4 * split]
    # Unpacking takes its time, so quantised weights want more programs at once.
    wanted = (2.9 if bits == 4 else 3.0) * processors
    split = next((split for split in splits if tiles * split >= wanted), splits[-1])
    codes = block_n * block_size * 2 + 4 * block_n * 32 // bits
    stages = _fitting(3, codes * (2 if is_gated else 1) + 2 * rows * block_k, shared_bytes)
    return Tiling(block_n, block_k, split, 4 if rows > 32 else 2, stages, 0)


def pad_rows(rows: int) -> int:
    """Rows of a tile where there are so many; past 128 there are several tiles."""
    return next((tile for tile in (16, 32, 64) if rows <= tile), 128)


def pad_block_rows(rows: int) -> int:
    """The same for quantised weights; past 64 there are several tiles."""
    return next((tile for tile in (8, 16, 32) if rows <= tile), 64)


def _fitting(stages: int, stage_bytes: int, shared_bytes: int) -> int:
    return max(1, min(stages, shared_bytes // stage_bytes))


def _choose_split(tiles: int, steps: int, processors: int) -> int:
    """The fewest parts that fill the processors well; none with fewer than four tiles of input to walk."""
    fills = {}
    for split in (1, 2, 4, 8):
        if split > 1 and steps < 4 * split:
            break
        programs = tiles * split
        fills[split] = programs / (-(-programs // processors) * processors)
    good = (split for split, fill in fills.items() if fill >= _GOOD_FILL)
    return next(good, max(fills, key=lambda split: fills[split]))
