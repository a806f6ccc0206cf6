"""To how many rows graphs are padded: no more than a machine's kernels ask for, which a probe finds out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from shardcompute.backends.ort.executor import _probe_graph
from shardcompute.backends.ort.program import RowPadding, Run, Value


@dataclass
class FakeGraph:
    """Gives rows other numbers in a computation of a number of rows that its kernels treat in another way."""

    is_other: Callable[[int], bool]
    takes: list[Value] = field(default_factory=lambda: [Value("x", 4, None, buffer=np.zeros((32, 4), "f"))])
    makes: list[Value] = field(default_factory=lambda: [Value("y", 4, None, buffer=np.zeros((32, 4), "f"))])

    def run(self, run: Run) -> None:
        x, y = self.takes[0].buffer[: run.rows], self.makes[0].buffer
        y[: run.rows] = x * 2
        if self.is_other(run.rows):
            y[run.rows - 1] += 1e-6


@pytest.mark.parametrize(
    ("is_other", "expected"),
    [
        (lambda rows: False, RowPadding(1, 1)),
        (lambda rows: rows == 1, RowPadding(2, 1)),
        (lambda rows: rows % 2 == 1, RowPadding(2, 2)),
        (lambda rows: rows in (1, 5), RowPadding(2, 2)),
        (lambda rows: rows % 4 != 0, RowPadding(4, 4)),
        (lambda rows: rows == 14, RowPadding(4, 4)),
        (lambda rows: rows < 16, RowPadding(16, 16)),
    ],
)
def test_the_probe_finds_the_cheapest_padding_that_keeps_rows_equal(
    is_other: Callable[[int], bool], expected: RowPadding
) -> None:
    assert _probe_graph(FakeGraph(is_other)) == expected  # type: ignore[arg-type]


def test_only_a_row_alone_is_padded_where_only_that_is_another_one() -> None:
    padding = RowPadding(2, 1)
    assert [padding.padded(rows) for rows in (0, 1, 2, 3, 7, 128)] == [0, 2, 2, 3, 7, 128]
    # Graphs take 128 rows at a time: the one that is left would be alone.
    assert [padding.padded(rows) for rows in (129, 130, 131, 257)] == [130, 130, 131, 258]
    assert [RowPadding(4, 4).padded(rows) for rows in (1, 4, 5, 129)] == [4, 4, 8, 132]


def test_what_suits_two_graphs_suits_each() -> None:
    assert RowPadding(2, 1).joined(RowPadding(1, 1)) == RowPadding(2, 1)
    assert RowPadding(2, 1).joined(RowPadding(4, 4)) == RowPadding(4, 4)
