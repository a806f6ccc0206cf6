"""Drafts of the last stage on the driver's side: offered while they fit, and never believed."""

from __future__ import annotations

from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Draft, Opening
from shardcompute.decoding.drafting import GRADES
from shardcompute.decoding.head_drafts import HeadDraftCache

OPENING = Opening(1, Sampling(), 2)


def test_drafts_are_offered_where_the_known_tokens_end() -> None:
    drafter = HeadDraftCache()
    drafter.take(Draft(1, 4, (7, 8, 9), 2))
    assert drafter.propose(1, [1, 2, 3, 4], [], 2, OPENING) == Draft(1, 4, (7, 8), 2)
    assert drafter.has(1, [1, 2, 3, 4])
    assert not drafter.has(1, [1, 2, 3])
    assert not drafter.has(2, [1, 2, 3, 4])
    assert drafter.propose(1, [1, 2, 3, 4, 7], [], 2, OPENING) is None
    assert drafter.propose(1, [1, 2, 3, 4], [7], 2, OPENING) is None


def test_a_grade_that_does_not_exist_is_the_highest() -> None:
    drafter = HeadDraftCache()
    drafter.take(Draft(1, 1, (7,), 99))
    assert drafter.propose(1, [1], [], 2, OPENING) == Draft(1, 1, (7,), GRADES - 1)


def test_what_is_forgotten_is_not_offered() -> None:
    drafter = HeadDraftCache()
    drafter.take(Draft(1, 1, (7,), 0))
    drafter.forget(1)
    drafter.forget(2)
    assert drafter.propose(1, [1], [], 2, OPENING) is None
