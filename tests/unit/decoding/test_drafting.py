"""What is left of a draft when the session has moved on."""

from __future__ import annotations

import pytest

from shardcompute.core.steps import Draft
from shardcompute.decoding.drafting import DraftTask


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        ((1, 2), (3, 4, 5)),
        ((1, 2, 3), (4, 5)),
        ((1, 2, 3, 4), (5,)),
        ((1, 2, 3, 4, 5), None),
        ((1, 2, 4), None),
        ((1, 3), None),
        ((1,), None),
        ((1, 2, 3, 4, 5, 6), None),
    ],
)
def test_the_remainder_follows_what_a_session_has_now(
    tokens: tuple[int, ...], left: tuple[int, ...] | None
) -> None:
    task = DraftTask(7, "model", (1, 2))
    assert task.remainder((1, 2)) is None, "nothing is there yet"
    task.draft, task.seconds = Draft(7, 2, (3, 4, 5), grade=2), 0.3
    assert task.remainder(tokens) == (None if left is None else Draft(7, len(tokens), left, 2))
    assert task.token_s == pytest.approx(0.1)
