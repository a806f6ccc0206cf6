"""How the work of a matrix product is cut into programs.

The cut along the input depends on the matrix and the chip alone, never on the rows, so that every row is summed
in the same order in any batch. Measured on an H200 over the matrices of an 8B model: tiles of 64 outputs and 128
inputs, the weights as the tall side of the product, read at 84 % (all of a decode step) to 100 % (the head) of
copy bandwidth; what mattered was that the programs fill whole waves of processors and keep enough in flight. Quantised
weights want small programs, three for each processor, and where a program walks far a fourth tile in flight: together
2,102 us for a step of one row in 4 bits, 2,154 with fewer. Past 128 rows arithmetic is what takes time: tiles of 128
outputs and 128 or 256 rows reach 0.85 to 1.0 of torch's library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_ROWS = 256
PREFETCH_LINES = 4
_LINE_VALUES = 64
_GOOD_FILL = 0.72


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
        block_n = 128 if is_gated and split == 1 and width_out % 128 == 0 else 64
        stages = _fitting(4, block_k * (block_n * (4 if is_gated else 2) + 2 * rows), shared_bytes)
        return Tiling(block_n, block_k, split, 8, stages, 0)
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
    block_n, block_k = 128 if rows > 64 else 64, block_size * 16 // bits
    tiles = -(-width_out // 64)
    splits = [split for split in (1, 2, 4, 8) if split == 1 or groups >= 4 * split]
    # Unpacking takes its time, so quantised weights want more programs at once.
    split = next((split for split in splits if tiles * split >= 3 * processors), splits[-1])
    codes = block_n * block_size * 2 + 4 * block_n * 32 // bits
    # A program that walks far along the input gains from one more tile in flight; a gated one reads two anyway.
    wanted_stages = 4 if bits == 4 and rows <= 64 and not is_gated and groups >= 8 * split else 3
    stages = _fitting(wanted_stages, codes * (2 if is_gated else 1) + 2 * rows * block_k, shared_bytes)
    return Tiling(block_n, block_k, split, 8 if rows > 64 else 4 if rows > 32 else 2, stages, 0)


def choose_expert_tiling(
    width_out: int,
    width_in: int,
    per_token: int,
    *,
    bits: int,
    groups: int,
    is_gated: bool,
    processors: int,
) -> Tiling:
    """For the matrices of experts, of which a row has `per_token`: one row alone is to fill the chip with them, if
    they are quantised and unpacking takes its time. Only what is not gated is split."""
    block_n, block_k = 64, 128 if width_in >= 512 else 64
    if bits == 16:
        return Tiling(block_n, block_k, 1, 4, 4, 0)
    programs = per_token * -(-width_out // block_n)
    if is_gated:
        return Tiling(32 if programs < 2 * processors else 64, block_k, 1, 2, 4, 0)
    splits = [split for split in (1, 2, 4, 8) if split == 1 or groups >= 4 * split]
    split = next((split for split in splits if programs * split >= 2.9 * processors), splits[-1])
    return Tiling(block_n, block_k, split, 2, 4, 0)


@dataclass(frozen=True, slots=True)
class WideTiling:
    """Outputs, rows and inputs per tile, warps and pipeline stages of a program that walks all parts itself."""

    block_n: int
    rows: int
    block_k: int
    warps: int
    stages: int


def choose_wide_tiling(rows: int, few: Tiling, *, is_gated: bool, shared_bytes: int) -> WideTiling:
    """`few` is how few rows are multiplied. A program keeps the sums so far and those of a part in registers."""
    block_k = min(64, few.block_k)
    block_n, tile_rows, stages = 128, 128, 4
    if few.split == 1 and not is_gated and rows > MAX_ROWS:
        tile_rows, stages = 256, 3
    elif few.split > 1 and is_gated:
        tile_rows = 64
    stage_bytes = 2 * block_k * (block_n * (2 if is_gated else 1) + tile_rows)
    return WideTiling(block_n, tile_rows, block_k, 8, _fitting(stages, stage_bytes, shared_bytes - 1024))


def is_wide(rows: int, few: Tiling | None = None) -> bool:
    """Whether a program walks all of the input: where there are enough of them without parts."""
    return rows > MAX_ROWS or (rows > 128 and few is not None and few.split == 1)


def pad_rows(rows: int) -> int:
    """Rows of a tile where there are so many; past 128 there are several tiles."""
    return next((tile for tile in (16, 32, 64) if rows <= tile), 128)


def pad_block_rows(rows: int, width_out: int) -> int:
    """The same for quantised weights."""
    most = 128 if width_out % 128 == 0 else 64
    return next((tile for tile in (8, 16, 32, 64) if rows <= tile), most)


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
