"""A pause amid a move is explained by what was logged of the change of layout."""

from __future__ import annotations

import pytest

from shardcompute.bench.migration import pause_parts
from shardcompute.core.phases import Phase
from shardcompute.node.coordinator.executor import ACTIVATING, CONNECTING, FENCING
from shardcompute.node.worker.migration.receiver import LAST_ROWS

FIRST_EPOCH = [Phase(CONNECTING, 0.5, 1.0), Phase(ACTIVATING, 0.1, 1.1)]
MOVE = [
    Phase(FENCING, 0.01, 10.06),
    Phase(LAST_ROWS, 0.02, 10.08),
    Phase(LAST_ROWS, 0.04, 10.10),
    Phase(CONNECTING, 0.10, 10.15),
    Phase(ACTIVATING, 0.01, 10.17),
]


def test_the_parts_of_a_pause_are_told_apart_and_add_up_to_it() -> None:
    parts = pause_parts(10.0, 10.3, [*FIRST_EPOCH, *MOVE])
    assert {each.name: each.seconds for each in parts} == pytest.approx(
        {"lost step": 0.05, "last rows": 0.04, "connecting": 0.06, "activating": 0.02, "first step": 0.13}
    )
    assert sum(each.seconds for each in parts) == pytest.approx(0.3)


def test_a_pause_that_began_amid_the_move_has_what_was_left_of_it() -> None:
    parts = pause_parts(10.12, 10.3, [*FIRST_EPOCH, *MOVE])
    assert {each.name: each.seconds for each in parts} == pytest.approx(
        {"lost step": 0.0, "last rows": 0.0, "connecting": 0.03, "activating": 0.02, "first step": 0.13}
    )


def test_a_pause_for_another_reason_has_no_parts() -> None:
    assert pause_parts(5.0, 6.0, [*FIRST_EPOCH, *MOVE]) == []
