"""Models that only `transformers` runs, and models that cannot be cut: who may hold them, and what a plan says."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shardcompute.control import Placement, Unplaceable, place
from shardcompute.control.placement.request import placement_request
from shardcompute.control.sizes import sizes_of
from support.models.plain_model import plain_model


def test_models_that_only_transformers_runs_go_where_it_is(cluster: Any) -> None:
    model = plain_model(runner="transformers")
    cluster.join("a", 10_000)
    cluster.join("b", 10_000, fallback="transformers-5.22/float32/avx2")
    cluster.join("c", 10_000)
    request = placement_request(cluster.state, model, 0.0)
    found = place(request)
    assert isinstance(found, Placement)
    assert found.nodes == {"b"}
    reasons = dict(found.unused)
    assert all('pip install "shardcompute[torch]"' in reasons[node] for node in ("a", "c"))
    assert {offer.node for offer in placement_request(cluster.state, plain_model(), 0.0).offers} == {
        "a",
        "b",
        "c",
    }


def test_without_transformers_anywhere_the_plan_says_what_to_install(cluster: Any) -> None:
    cluster.join("a", 10_000)
    found = place(placement_request(cluster.state, plain_model(runner="transformers"), 0.0))
    assert isinstance(found, Unplaceable)
    assert any("shardcompute[torch]" in reason for reason in found.reasons)


def test_a_model_that_cannot_be_cut_needs_one_machine(cluster: Any) -> None:
    whole = plain_model(is_whole=True)
    needed = sizes_of(whole).on("").total_bytes
    for node in ("a", "b"):
        cluster.join(node, needed - 1)
    found = place(placement_request(cluster.state, whole, 0.0))
    assert isinstance(found, Unplaceable)
    assert found.missing_bytes == 1
    assert any("one machine must hold all of it" in reason for reason in found.reasons)
    assert isinstance(place(placement_request(cluster.state, replace(whole, is_whole=False), 0.0)), Placement)
    cluster.join("c", needed)
    found = place(placement_request(cluster.state, whole, 0.0))
    assert isinstance(found, Placement)
    assert found.nodes == {"c"}
