from __future__ import annotations

import pytest

from shardcompute.decoding import accept_drafts


@pytest.mark.parametrize(
    ("drafts", "chosen", "accepted"),
    [
        ([], [5], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([1, 2], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),
    ],
)
def test_drafts_hold_up_to_the_first_difference(drafts: list[int], chosen: list[int], accepted: int) -> None:
    assert accept_drafts(drafts, chosen) == accepted
