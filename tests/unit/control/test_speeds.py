"""Placement counts with what was measured: on the node, with the model or one of its shape, in service of late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.placement.cost_model import first_token_s
from shardcompute.control.placement.request import placement_request
from shardcompute.control.sizes import shape_of
from shardcompute.control.state import Assignment, LayerShape, LayerTime, Model


def measure(cluster: Any, node: str, model: Model, layer_s: float, **more: Any) -> None:
    life = cluster.state.nodes[node].incarnation
    fields = {"model": model.name, "layer_s": layer_s, "shape": shape_of(model), **more}
    cluster.tell(happened.NodeMeasured(node=node, incarnation=life, **fields))


def speed_of(cluster: Any, node: str, model: Model) -> float:
    """Seconds per byte, with which placement counts."""
    request = placement_request(cluster.state, model, cluster.now_s)
    [offer] = [offer for offer in request.offers if offer.node == node]
    return offer.seconds_per_byte


def test_a_model_of_the_same_shape_is_known_before_it_is_tried(cluster: Any, model: Model) -> None:
    cluster.join("a")
    measure(cluster, "a", model, 30.0)
    twin, other = replace(model, name="tuned"), replace(model, name="other", hidden=16)
    assert speed_of(cluster, "a", twin) == speed_of(cluster, "a", model) == 0.3
    assert speed_of(cluster, "a", other) == 1.0, "another width is another matter: as probed"
    assert speed_of(cluster, "a", replace(twin, weight_form="int4")) == 1.0


def test_the_same_name_in_another_form_is_measured_anew(cluster: Any, model: Model) -> None:
    cluster.join("a")
    for _ in range(5):
        measure(cluster, "a", model, 30.0)
    smaller = replace(model, weight_form="int4", layer_bytes=(50,) * 6)
    measure(cluster, "a", smaller, 10.0)
    assert speed_of(cluster, "a", smaller) == pytest.approx(0.2)


def test_a_node_that_comes_back_brings_what_it_remembers(cluster: Any, model: Model) -> None:
    time = LayerTime("tuned", 40.0, shape=shape_of(model), prefill_s=2.0)
    cluster.join("a", remembered=(time,))
    assert speed_of(cluster, "a", model) == 0.4
    assert cluster.state.nodes["a"].remembered == ()
    measure(cluster, "a", model, 60.0)
    cluster.join("a", remembered=(time,))
    assert speed_of(cluster, "a", model) == 0.6, "what was measured for this cluster counts"
    assert [each.model for each in cluster.state.nodes["a"].layer_times] == ["m", "tuned"]


def test_what_steps_take_in_service_replaces_what_was_measured(cluster: Any, model: Model) -> None:
    cluster.join("a")
    for _ in range(5):
        measure(cluster, "a", model, 30.0, prefill_layer_s=3.0, batch_layer_s=60.0)
    measure(cluster, "a", model, 90.0, prefill_layer_s=6.0, is_served=True, measured_at_s=7.0)
    [time] = cluster.state.nodes["a"].layer_times
    assert (time.seconds, time.loaded_s, time.is_served, time.measured_at_s) == (90.0, 30.0, True, 7.0)
    assert (time.prefill_s, time.batch_s) == (6.0, 60.0)
    assert speed_of(cluster, "a", model) == 0.9


def test_machines_that_do_not_serve_are_not_believed_to_be_better_for_that(
    cluster: Any, model: Model
) -> None:
    """A model takes a little longer in service, on every machine; by more on one that has trouble."""
    for name in "abc":
        cluster.join(name)
        measure(cluster, name, model, 30.0)
    measure(cluster, "a", model, 33.0, is_served=True)
    assert speed_of(cluster, "a", model) == speed_of(cluster, "b", model) == pytest.approx(0.33)
    measure(cluster, "a", model, 120.0, is_served=True)
    assert speed_of(cluster, "b", model) == pytest.approx(0.3 * 1.25)
    measure(cluster, "c", model, 30.0, is_served=True)
    assert speed_of(cluster, "b", model) == pytest.approx(0.3), (
        "who serves without trouble says what is usual"
    )
    measure(cluster, "c", model, 60.0, is_served=True)
    assert speed_of(cluster, "b", model) == pytest.approx(0.6), (
        "what slows all of them would slow this one, too"
    )


def test_a_chain_takes_layers_off_a_machine_that_became_slow_and_stays_calm(
    serving: Callable[..., Any], model: Model
) -> None:
    cluster = serving(2000, 2000)
    first, start, stop = cluster.shape()[0]
    for node in "ab":
        measure(cluster, node, model, 100.0)
    measure(cluster, first, model, 115.0, is_served=True)
    assert cluster.settle() == [], "a little is not worth a move"
    measure(cluster, first, model, 600.0, is_served=True)
    cluster.settle()
    held = {node: last - begin for node, begin, last in cluster.shape()}
    assert held.get(first, 0) < stop - start
    assert "better" in cluster.state.chains["m#1"].last_move
    epoch = cluster.state.chains["m#1"].epoch
    for pace in (1.0, 6.0) * 5:
        measure(cluster, first, model, 100.0 * pace, is_served=True)
        cluster.settle()
    assert cluster.state.chains["m#1"].epoch <= epoch + 2, "it does not go back and forth"


def test_the_overhead_of_a_frame_counts(cluster: Any, model: Model) -> None:
    cluster.join("a", overhead_s=5.0)
    request = placement_request(cluster.state, model, 0.0)
    assert request.offers[0].overhead_s == 5.0


def test_time_to_the_first_token(cluster: Any, model: Model) -> None:
    cluster.join("a", prefill_seconds_per_byte=0.01, overhead_s=2.0)
    stages = (Assignment("a", 0, 6),)
    request = placement_request(cluster.state, model, 0.0)
    hops_s = 0.001
    # Ten rows through 600 bytes, one row through the head's 50, a frame.
    assert first_token_s(request, stages, 10) == pytest.approx(60.0 + 50.0 + 2.0 + hops_s, abs=0.1)
    measure(cluster, "a", model, 100.0, prefill_layer_s=4.0)
    request = placement_request(cluster.state, model, 0.0)
    assert first_token_s(request, stages, 10) == pytest.approx(240.0 + 50.0 + 2.0 + hops_s, abs=0.1)
    cluster.join("b")
    request = placement_request(cluster.state, model, 0.0)
    assert first_token_s(request, (Assignment("a", 0, 3), Assignment("b", 3, 6)), 10) is None


def test_shapes_are_alike_within_what_estimates_are_off() -> None:
    shape = LayerShape(64, 1000, "int4")
    assert shape.is_like(LayerShape(64, 1090, "int4"))
    assert not shape.is_like(LayerShape(64, 1200, "int4"))
