from __future__ import annotations

from dataclasses import replace

import pytest

from shardcompute.control import Model, NodeCapacity, PlacementPolicy, Replacement, Request, Unplaceable
from shardcompute.control import replace_stage as choose
from shardcompute.control.state import Assignment, MeasuredLink

STAGES = (Assignment("a", 0, 2), Assignment("b", 2, 4), Assignment("c", 4, 6))
HELD = {"a": ((0, 2),), "b": ((2, 4),), "c": ((4, 6),)}


def request(model: Model, *offered: tuple[str, int], speed: float = 1e-6, **held: object) -> Request:
    ranges = {**HELD, **held}
    offers = tuple(NodeCapacity(node, size, speed, 0.0, ranges.get(node, ())) for node, size in offered)
    return Request(model, offers, policy=PlacementPolicy(source_bytes_per_s=1e3))


def replace_stage(*args: object) -> Replacement:
    replacement = choose(*args)  # type: ignore[arg-type]
    assert isinstance(replacement, Replacement), replacement
    return replacement


def test_nothing_lost_means_the_same_machines(model: Model) -> None:
    terms = request(model, ("a", 300), ("b", 300), ("c", 300))
    assert replace_stage(terms, STAGES, ()) == Replacement(STAGES, 0, 0.0, "same machines")


def test_a_standby_that_holds_the_layers_comes_first(model: Model) -> None:
    terms = request(model, ("a", 900), ("c", 900), ("d", 300), d=((2, 4),))
    found = replace_stage(terms, STAGES, {"b"}, [Assignment("d", 2, 4)])
    assert found.how == "standby promoted"
    assert found.stages == (STAGES[0], Assignment("d", 2, 4), STAGES[2])
    assert found.moved_bytes == 0


def test_a_neighbour_with_memory_takes_over(model: Model) -> None:
    terms = request(model, ("a", 280), ("c", 600))
    found = replace_stage(terms, STAGES, {"b"})
    assert (found.stages, found.how) == ((STAGES[0], Assignment("c", 2, 6)), "gap filled")
    assert found.moved_bytes == 200


def test_neighbours_share_what_neither_can_take_alone(model: Model) -> None:
    terms = request(model, ("a", 400), ("c", 400))
    found = replace_stage(terms, STAGES, {"b"})
    assert found.stages == (Assignment("a", 0, 3), Assignment("c", 3, 6))
    assert found.moved_bytes == 200


def test_a_spare_machine_fills_the_gap(model: Model) -> None:
    terms = request(model, ("a", 280), ("c", 280), ("d", 220))
    found = replace_stage(terms, STAGES, {"b"})
    assert found.stages == (STAGES[0], Assignment("d", 2, 4), STAGES[2])


def test_a_machine_with_little_to_do_fills_the_gap_and_the_others_stay(model: Model) -> None:
    stages = (Assignment("a", 0, 2), Assignment("b", 2, 4), Assignment("c", 4, 5), Assignment("d", 5, 6))
    held = {"b": ((2, 4),), "c": ((4, 5),), "d": ((5, 6),)}
    terms = request(model, ("b", 280), ("c", 280), ("d", 280), **held)
    found = replace_stage(terms, stages, {"a"})
    assert found.stages == (Assignment("c", 0, 2), Assignment("b", 2, 4), Assignment("d", 4, 6))
    assert found.how == "gap filled"


def test_a_resplit_moves_as_little_as_memory_allows(model: Model) -> None:
    # The gap is larger than the room at either side of it, so layers must shift from a to d.
    stages = (Assignment("a", 0, 3), Assignment("b", 3, 4), Assignment("c", 4, 6))
    terms = request(model, ("a", 400), ("c", 280), ("d", 170), a=((0, 3),))
    found = replace_stage(terms, stages, {"b"})
    assert sum(stage.stop - stage.start for stage in found.stages) == 6
    assert found.moved_bytes == 100


def test_two_neighbours_lost_at_once_leave_one_gap(model: Model) -> None:
    terms = request(model, ("c", 900), ("d", 900))
    found = replace_stage(terms, STAGES, {"a", "b"})
    assert found.moved_bytes == 450
    assert found.stages in ((Assignment("c", 0, 6),), (Assignment("d", 0, 4), STAGES[2]))


def test_all_lost_is_placed_anew(model: Model) -> None:
    found = replace_stage(request(model, ("d", 900)), STAGES, {"a", "b", "c"})
    assert (found.stages, found.moved_bytes) == ((Assignment("d", 0, 6),), 700)


def test_bytes_are_moved_only_when_that_pays(model: Model) -> None:
    # d is ten times as fast as the neighbours, which have room for everything.
    terms = request(model, ("a", 500), ("c", 500), speed=1.0)
    quick = NodeCapacity("d", 900, 0.1)
    terms = replace(terms, offers=(*terms.offers, quick))
    patient = replace(terms, policy=PlacementPolicy(source_bytes_per_s=1e3, horizon_s=1e6))
    hasty = replace(terms, policy=PlacementPolicy(source_bytes_per_s=1e3, horizon_s=1e-6))
    assert replace_stage(patient, STAGES, {"b"}).stages == (Assignment("d", 0, 6),)
    assert replace_stage(hasty, STAGES, {"b"}).moved_bytes == 200


def test_what_is_missing_is_said(model: Model) -> None:
    found = choose(request(model, ("a", 280), ("c", 280)), STAGES, {"b"})
    assert isinstance(found, Unplaceable)
    assert found.missing_bytes == pytest.approx(2 * 110 + 50, abs=120)


def test_closed_links_rule_out_the_same_machines(model: Model) -> None:
    terms = request(model, ("a", 300), ("b", 300), ("c", 300))
    closed = replace(terms, links=(MeasuredLink("a", "b", 0.1, 1.0, is_open=False),))
    found = replace_stage(closed, STAGES, ())
    assert [stage.node for stage in found.stages][1] == "c"
