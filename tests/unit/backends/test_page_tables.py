"""Page tables: who owns which page of a pool."""

from __future__ import annotations

import pytest

from shardcompute.backends.kv import PageBudget
from shardcompute.backends.page_tables import PageTables
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CapacityError


def tables(pages: int = 4) -> PageTables:
    return PageTables(PageBudget(page_bytes=1, total_pages=pages, context_length=1000))


def test_pages_are_taken_from_the_beginning_and_used_again() -> None:
    table = tables()
    assert table.take([Segment(1, 0, 65), Segment(2, 0, 1)]) == [0, 1, 2]
    assert table.take([Segment(1, 10, 1)]) == []
    assert list(table[1]) == [0]
    assert table.take([Segment(2, 1, 80)]) == [1]
    table.release(1)
    assert table.take([Segment(3, 0, 100)]) == [0, 3]


def test_a_batch_is_taken_as_a_whole_or_not_at_all() -> None:
    table = tables(2)
    with pytest.raises(CapacityError):
        table.take([Segment(1, 0, 10), Segment(2, 0, 100)])
    assert table.take([Segment(3, 0, 128)]) == [0, 1]


def test_adopting_names_the_pages_to_copy() -> None:
    table = tables()
    table.take([Segment(1, 0, 130)])
    assert table.adopt(1, 2, 64, is_moved=False) == ([0], [3])
    assert table.adopt(1, 3, 100, is_moved=True) == ((), ())
    assert list(table[3]) == [0, 1]
    assert table.take([Segment(4, 0, 1)]) == [2]
