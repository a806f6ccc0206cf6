"""QR codes: symbols that another encoder (segno) and a reader (OpenCV) agreed with, and what every symbol has."""

from __future__ import annotations

import hashlib
import re

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.node.admin.qr import Matrix, penalty, qr_matrix, qr_svg


def digest(matrix: Matrix) -> str:
    return hashlib.sha256("".join("01"[dark] for row in matrix for dark in row).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("length", "size", "expected"),
    [
        (17, 21, "40250feb5812e202"),
        (106, 37, "0bb91879dc71812d"),
        (230, 53, "c27cc0ff6ff3c038"),
        (858, 97, "7df6d43c06bdc861"),
    ],
)
def test_symbols_are_those_of_another_encoder(length: int, size: int, expected: str) -> None:
    matrix = qr_matrix("x" * length)
    assert (len(matrix), digest(matrix)) == (size, expected)


def test_the_patterns_by_which_readers_find_a_symbol() -> None:
    matrix = qr_matrix("http://192.168.1.5:8000/#/join/sc1.abc")
    finder = [[max(abs(x - 3), abs(y - 3)) != 2 for x in range(7)] for y in range(7)]
    for left, top in ((0, 0), (len(matrix) - 7, 0), (0, len(matrix) - 7)):
        assert [row[left : left + 7] for row in matrix[top : top + 7]] == finder
    assert [matrix[6][x] for x in range(8, len(matrix) - 8)] == [
        x % 2 == 0 for x in range(8, len(matrix) - 8)
    ]
    assert matrix[len(matrix) - 8][8]


def test_a_longer_text_needs_a_larger_symbol_up_to_the_largest() -> None:
    assert len(qr_matrix("x" * 2953)) == 177
    with pytest.raises(UsageError, match="too long"):
        qr_matrix("x" * 2954)
    assert len(qr_matrix("")) == 21


def test_uniform_symbols_are_the_worst() -> None:
    assert penalty(qr_matrix("hello")) < penalty([[True] * 21 for _ in range(21)])


def test_an_svg_is_one_drawing_without_anything_that_runs() -> None:
    svg = qr_svg("http://10.0.0.5:8000/#/join/sc1.abc")
    assert re.fullmatch(
        r'<svg xmlns="http://www\.w3\.org/2000/svg" viewBox="0 0 \d+ \d+" shape-rendering="crispEdges">'
        r'<path fill="#fff" d="[MHVhvz0-9,-]+"/><path fill="#000" d="[Mhvz0-9,-]+"/></svg>',
        svg,
    )
    matrix = qr_matrix("http://10.0.0.5:8000/#/join/sc1.abc")
    assert sum(int(width) for width in re.findall(r"h(\d+)v1", svg)) == sum(map(sum, matrix))
