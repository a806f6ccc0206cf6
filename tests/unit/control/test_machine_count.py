"""The fewest machines of a size: as few as any cut needs, and none where a layer is too much."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from msgspec.structs import replace

from shardcompute.control.machine_count import fewest_machines, held_by_ranks, least_room_bytes
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.sizes import HeldSums, sizes_of
from shardcompute.control.state import Model
from support.models.plain_model import plain_model, ranked_model


def _uneven() -> Model:
    """Layers of several sizes, and ends that weigh as much as some of them."""
    plain = plain_model()
    layers = (300, 100, 500, 100, 100, 400, 200)
    return replace(
        plain, layer_bytes=layers, work_bytes=layers, embedding_bytes=150, head_bytes=250, kv_tokens=0
    )


def _by_trying_all(held: HeldSums, room_bytes: int) -> int | None:
    count = held.layer_count
    for machines in range(1, count + 1):
        for inner in combinations(range(1, count), machines - 1):
            edges = (0, *inner, count)
            if all(held.memory_bytes(*cut) <= room_bytes for cut in pairwise(edges)):
                return machines
    return None


@pytest.mark.parametrize("spare_bytes", range(0, 2200, 100))
def test_no_cut_needs_fewer(spare_bytes: int) -> None:
    model = _uneven()
    held = sizes_of(model).on("")
    room_bytes = held.overhead_bytes + spare_bytes
    cuts = fewest_machines(model, "", room_bytes)
    assert (None if cuts is None else len(cuts)) == _by_trying_all(held, room_bytes)
    if cuts is not None:
        assert [layer for cut in cuts for layer in range(*cut)] == list(range(held.layer_count))
        assert all(held.memory_bytes(*cut) <= room_bytes for cut in cuts)


def test_the_least_room_holds_any_layer() -> None:
    model = _uneven()
    least = least_room_bytes(model, "")
    assert fewest_machines(model, "", least) is not None
    assert fewest_machines(model, "", least - 1) is None


def test_a_model_that_cannot_be_cut_needs_one_machine_that_holds_it() -> None:
    whole = replace(_uneven(), is_whole=True)
    total = sizes_of(whole).on("").total_bytes
    assert fewest_machines(whole, "", total) == ((0, 7),)
    assert fewest_machines(whole, "", total - 1) is None
    assert least_room_bytes(whole, "") == total


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_need_no_more_stages_than_one_machine_and_each_has_room(ranks: int) -> None:
    model, asked = ranked_model(), Parallelism(tp=ranks)
    held = held_by_ranks(model, "", asked)
    assert len(held) == ranks
    for room_bytes in range(60_000_000, 700_000_000, 80_000_000):
        cuts, alone = fewest_machines(model, "", room_bytes, asked), fewest_machines(model, "", room_bytes)
        assert cuts is not None
        assert alone is None or len(cuts) <= len(alone)
        assert all(each.memory_bytes(*cut) <= room_bytes for cut in cuts for each in held)
    least = least_room_bytes(model, "", asked)
    assert least < least_room_bytes(model, "")
    assert fewest_machines(model, "", least, asked) is not None
