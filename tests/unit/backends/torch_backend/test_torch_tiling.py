"""How skinny products are cut: sums in one order for any row count, within a processor's memory."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from shardcompute.backends.torch.kernels.tiling import (
    MAX_ROWS,
    Tiling,
    choose_block_tiling,
    choose_expert_tiling,
    choose_tiling,
    choose_wide_tiling,
    pad_block_rows,
    pad_rows,
)

SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (4096, 14336),
    (128256, 4096),
    (576, 576),
    (49152, 576),
    (64, 64),
    (7, 96),
    (2048, 1088),
]


@pytest.mark.parametrize(("width_out", "width_in"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("processors", "shared_bytes"), [(132, 232448), (46, 101376), (16, 101376)])
def test_tilings(
    width_out: int, width_in: int, bits: int, is_gated: bool, processors: int, shared_bytes: int
) -> None:
    chip = {"is_gated": is_gated, "processors": processors, "shared_bytes": shared_bytes}
    groups = -(-width_in * bits // (32 * 16))

    def pad(rows: int) -> int:
        return pad_rows(rows) if bits == 16 else pad_block_rows(rows, width_out)

    def choose(rows: int) -> Tiling:
        if bits == 16:
            return choose_tiling(pad(rows), width_out, width_in, **chip)
        return choose_block_tiling(pad(rows), width_out, groups, bits=bits, block_size=32, **chip)

    tilings = [choose(rows) for rows in range(1, MAX_ROWS + 1)]
    assert len({(tiling.split, tiling.part_inputs(width_in)) for tiling in tilings}) == 1
    for rows, tiling in enumerate(tilings, 1):
        weights = tiling.block_n * (2 if is_gated else 1) * bits // 8
        stage_bytes = tiling.block_k * (weights + 2 * pad(rows))
        assert tiling.stages == 1 or tiling.stages * stage_bytes <= shared_bytes
        assert tiling.split == 1 or width_in >= 4 * tiling.split * tiling.block_k
        assert tiling.prefetch * 128 <= tiling.part_inputs(width_in) * tiling.block_n * bits // 8


@pytest.mark.parametrize(("width_out", "width_in"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("shared_bytes", [232448, 101376])
def test_tiles_of_many_rows_walk_the_parts_of_few(
    width_out: int, width_in: int, bits: int, is_gated: bool, shared_bytes: int
) -> None:
    chip = {"is_gated": is_gated, "processors": 132, "shared_bytes": shared_bytes}
    if bits == 16:
        few = choose_tiling(16, width_out, width_in, **chip)
    else:
        groups = -(-width_in * bits // (32 * 16))
        few = choose_block_tiling(16, width_out, groups, bits=bits, block_size=32, **chip)
    for rows in (130, 300, 2048):
        wide = choose_wide_tiling(rows, few, is_gated=is_gated, shared_bytes=shared_bytes)
        assert few.part_inputs(width_in) % wide.block_k == 0
        stage_bytes = 2 * wide.block_k * (wide.block_n * (2 if is_gated else 1) + wide.rows)
        assert wide.stages == 1 or wide.stages * stage_bytes <= shared_bytes
        # Sums so far and those of a part: in a program's registers, of which a processor has 65,536.
        assert wide.block_n * wide.rows * (2 if is_gated else 1) * (2 if few.split > 1 else 1) <= 32768


def test_small_matrices_are_split_until_they_fill_the_chip() -> None:
    def split(width_out: int, width_in: int) -> int:
        return choose_tiling(
            16, width_out, width_in, is_gated=False, processors=132, shared_bytes=232448
        ).split

    assert split(128256, 4096) == 1
    assert split(4096, 4096) == 2
    assert split(6144, 4096) == 1
    assert split(3072, 2048) == 2


@pytest.mark.parametrize(
    ("width_out", "width_in", "per_token", "split"),
    [(4096, 14336, 2, 4), (2048, 768, 8, 1), (2880, 2880, 4, 4), (64, 64, 2, 1)],
)
def test_quantised_experts_are_split_until_one_row_fills_the_chip(
    width_out: int, width_in: int, per_token: int, split: int
) -> None:
    groups = -(-width_in // 128)
    tilings = [
        choose_expert_tiling(
            width_out, width_in, per_token, bits=bits, groups=groups, is_gated=is_gated, processors=132
        )
        for bits in (4, 16)
        for is_gated in (False, True)
    ]
    assert [tiling.split for tiling in tilings] == [split, 1, 1, 1]
    assert all(64 % tiling.block_n == 0 for tiling in tilings), "a tile of codes is not cut askew"
