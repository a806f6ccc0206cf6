"""Of former layouts that cost the same to go back to, one is chosen, and always the same."""

from __future__ import annotations

from shardcompute.control.placement.capacities import NodeCapacity, Request
from shardcompute.control.placement.replacement import keep_layout
from shardcompute.control.state import Assignment
from support.models.plain_model import plain_model


def test_two_former_layouts_of_equal_price() -> None:
    model = plain_model()
    half, end = model.layer_count // 2, model.layer_count

    def layout(first: str, second: str) -> tuple[Assignment, ...]:
        return Assignment(first, 0, half), Assignment(second, half, end)

    offers = tuple(
        NodeCapacity(name, 10**9, 1.0, held=held)
        for name, held in (("a", ((0, half),)), ("b", ((half, end),)), ("c", ((half, end),)), ("d", ()))
    )
    request = Request(model, offers)
    former = [layout("a", "c"), layout("a", "b")]
    assert keep_layout(request, layout("d", "b"), former) == layout("a", "b")
    assert keep_layout(request, layout("d", "b"), former[::-1]) == layout("a", "b")
