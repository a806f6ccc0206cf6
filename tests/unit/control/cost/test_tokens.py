"""What tokens cost: sums by hand, what is not known, and machines that are not there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shardcompute.control import ClusterState, apply
from shardcompute.control import events as happened
from shardcompute.control.cost.tokens import cost_of
from shardcompute.control.cost.what_if import ImaginedMachines, most_kv_tokens, with_machines
from shardcompute.control.placement.parallelism import PIPELINE, Parallelism
from shardcompute.control.placement.place import Placement, place
from shardcompute.control.placement.request import placement_request
from shardcompute.core.errors import UsageError
from shardcompute.node.admin.dry_run import plan_model
from shardcompute.node.admin.what_if import imagine
from support.models.plain_model import ranked_model

MODEL = ranked_model()
GIB = 1 << 30


def joined(node: str, *, memory_bytes: int = 4 * GIB, watts: float = 0.0, price: float | None = None):  # type: ignore[no-untyped-def]
    return happened.NodeJoined(
        node=node,
        name=node.upper(),
        role="worker",
        address=f"tcp://{node}",
        device="cpu",
        memory_bytes=memory_bytes,
        threads=2,
        version="1",
        incarnation=1,
        now_s=0.0,
        seconds_per_byte=1e-10,
        stated_watts=watts,
        price_per_hour=price,
    )


def cluster(*nodes: happened.NodeJoined) -> ClusterState:
    state = ClusterState()
    for event in nodes:
        state = apply(apply(state, event), happened.NodeSeen(event.node, 1, 0.0))
    return state


def placed(state: ClusterState, stages: int) -> Placement:
    known = placement_request(state, MODEL, 0.0)
    found = place(
        type(known)(known.model, known.offers, driver=state.driver, parallel=Parallelism(pp=stages))
    )
    assert isinstance(found, Placement)
    assert len(found.stages) == stages
    return found


def test_a_million_tokens_take_what_all_machines_draw_for_as_long_as_they_take() -> None:
    state = cluster(joined("a", watts=100.0), joined("b", watts=50.0))
    plan = placed(state, 2)
    cost = cost_of(state, plan, price_per_kwh=0.5)
    hours = 1e6 / plan.predicted_tokens_per_s_many / 3600
    assert cost.watts == 150
    assert cost.kwh_many == pytest.approx(0.150 * hours)
    assert cost.price_many == pytest.approx(0.5 * 0.150 * hours)
    assert cost.kwh_one_stream == pytest.approx(0.150 * 1e6 / plan.predicted_tokens_per_s_one_stream / 3600)
    assert cost.is_upper_bound
    assert "at most" in cost.told()[0]


def test_who_waits_draws_what_was_measured_at_rest() -> None:
    state = cluster(joined("a", watts=100.0), joined("b", watts=100.0))
    state = apply(state, happened.NodeSeen("a", 1, 0.0, idle_watts=10.0, busy_watts=777.0))
    state = apply(state, happened.NodeSeen("b", 1, 0.0, idle_watts=10.0))
    plan = placed(state, 2)
    cost = cost_of(state, plan)
    token_s = 1 / plan.predicted_tokens_per_s_one_stream
    busy_s = sum(stage.step_s for stage in plan.stages)
    joules = 2 * 10 * token_s + 90 * busy_s
    assert cost.kwh_one_stream == pytest.approx(joules * 1e6 / 3.6e6)
    assert cost.watts == 200  # what owners say counts before what counters do
    assert not cost.is_upper_bound
    assert cost.told()[1] == "cost: unknown, no price was given (--price-kwh)"


def test_what_a_counter_says_counts_where_nobody_says_anything() -> None:
    state = apply(cluster(joined("a")), happened.NodeSeen("a", 1, 0.0, busy_watts=65.0))
    assert cost_of(state, placed(state, 1)).watts == 65


def test_an_unknown_machine_makes_the_sum_unknown() -> None:
    state = cluster(joined("a", watts=100.0), joined("b"))
    cost = cost_of(state, placed(state, 2), price_per_kwh=0.5)
    assert (cost.watts, cost.kwh_many, cost.price_many, cost.undrawn) == (None, None, None, ("B",))
    assert cost.told() == ("energy: unknown, nobody has said what B draws (join --watts N)",)


def test_a_rented_machine_costs_its_price_and_no_electricity() -> None:
    state = cluster(joined("a", price=2.0))
    plan = placed(state, 1)
    cost = cost_of(state, plan, price_per_kwh=100.0)
    assert cost.price_many == pytest.approx(2.0 * 1e6 / plan.predicted_tokens_per_s_many / 3600)
    assert cost.kwh_many is None


def test_a_plan_says_what_tokens_cost() -> None:
    state = cluster(joined("a", watts=100.0))
    told = plan_model(state, MODEL, 1, 0.0, PIPELINE, price_per_kwh=0.3)
    assert told.chains[0].cost_told[0] in told.text
    assert "at 0.3 a kWh" in told.text
    priced = replace(state, placing=replace(state.placing, price_per_kwh=0.7))
    assert "at 0.7 a kWh" in plan_model(priced, MODEL, 1, 0.0, PIPELINE).text


def test_more_memory_holds_more_context() -> None:
    small, large = (
        placement_request(cluster(joined("a", memory_bytes=size)), MODEL, 0.0) for size in (2 * GIB, 3 * GIB)
    )
    few, many = most_kv_tokens(small), most_kv_tokens(large)
    assert 0 < few < many
    for request, tokens in ((small, few), (large, many)):
        for asked, fits in ((tokens, True), (int(tokens * 1.05), False)):
            model = replace(request.model, kv_tokens=asked)
            offers = placement_request(
                cluster(joined("a", memory_bytes=request.offers[0].memory_bytes)), model, 0.0
            )
            assert isinstance(place(offers), Placement) is fits


def test_another_machine_is_like_the_middle_one() -> None:
    state = cluster(joined("a"), joined("b"))
    state = apply(state, happened.LinkMeasured("a", "b", 0.02, 1e7))
    imagined = with_machines(state, ImaginedMachines(2, 8 * GIB))
    assert set(imagined.state.nodes) == {"a", "b", "what-if-1", "what-if-2"}
    new = imagined.state.nodes["what-if-1"]
    assert (new.memory_bytes, new.seconds_per_byte, new.shards) == (8 * GIB, 1e-10, ())
    for other in ("a", "b", "what-if-2", state.driver):
        link = imagined.state.link("what-if-1", other)
        assert link is not None
        assert (link.rtt_s, link.bytes_per_s) == (0.02, 1e7)
    faster = with_machines(state, ImaginedMachines(1, GIB, bytes_per_s=5e10)).state.nodes["what-if-1"]
    assert faster.seconds_per_byte == pytest.approx(2e-11)
    with pytest.raises(UsageError, match="no machine has joined"):
        with_machines(ClusterState(), ImaginedMachines(1, GIB))


def test_what_another_machine_would_bring() -> None:
    state = cluster(joined("a", memory_bytes=GIB // 2, watts=40.0))
    view = imagine(state, MODEL, ImaginedMachines(1, 8 * GIB), 0.0, PIPELINE, price_per_kwh=0.3)
    assert (view.before.is_possible, view.after.is_possible, view.is_used) == (False, True, True)
    assert "it would fit, with" in view.told
    assert view.kv_tokens_before == 0 < view.kv_tokens_after
    roomy = cluster(joined("a", memory_bytes=16 * GIB, watts=40.0))
    useless = imagine(roomy, MODEL, ImaginedMachines(1, GIB, bytes_per_s=1e7), 0.0, PIPELINE)
    assert not useless.is_used
    assert "the model would run without it" in useless.told
    assert useless.before.predicted_tokens_per_s_many == useless.after.predicted_tokens_per_s_many
    split = imagine(
        cluster(joined("a"), joined("b")), MODEL, ImaginedMachines(1, 4 * GIB), 0.0, Parallelism(pp=3)
    )
    assert split.is_used
    assert split.after.predicted_tokens_per_s_many > split.before.predicted_tokens_per_s_many
    assert "many from" in split.told
    assert "what that costs is not known" in split.told
