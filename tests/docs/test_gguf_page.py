"""The page about GGUF lists every block type with what it really is held as."""

from __future__ import annotations

import re
from pathlib import Path

from shardcompute.backends.footprint import MatrixForm, matrix_bytes
from shardcompute.models.families import GGUF_ARCHITECTURES
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS

PAGE = Path(__file__).parents[2] / "docs" / "gguf.md"
HOLDERS = ("onnx/cpu", "torch/cuda", "mlx/gpu")
SIDE = 1024


def test_the_table_of_types_is_right() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    told = {name: tuple(rest) for name, *rest in rows[2:]}
    expected = {}
    for name, layout in BLOCK_LAYOUTS.items():
        form = MatrixForm(layout.bits, layout.block_size, layout.has_shifts)
        costs = [matrix_bytes(holder, form, SIDE, SIDE, 0) / SIDE**2 for holder in HOLDERS]
        file = layout.file_bytes / layout.file_block
        expected[name] = (f"{file:.2f}", form.words, *(f"{cost:.2f}" for cost in costs))
    assert told == expected


def test_the_architectures_are_those_that_are_read() -> None:
    told = PAGE.read_text().partition("As `general.architecture` names them:")[2].partition(".\n")[0]
    assert sorted(re.findall(r"`([\w-]+)`", told)) == sorted(GGUF_ARCHITECTURES)
