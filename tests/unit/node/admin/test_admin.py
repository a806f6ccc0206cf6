"""What a cluster tells about itself, and what may be asked of it, over a cluster without sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from shardcompute.backends.exactness import describe_exactness
from shardcompute.cli.cluster.text import (
    describe_cluster,
    describe_device,
    describe_memory,
    describe_parts,
    describe_trouble,
)
from shardcompute.control import events as happened
from shardcompute.control.sizes import sizes_of
from shardcompute.core.errors import (
    AuthError,
    CapacityError,
    QueueFullError,
    SourceError,
    UnknownModelError,
    UsageError,
    WouldReplaceError,
)
from shardcompute.core.generation import Delta, GenerationRequest, Interruption, Timings, TokenChoice
from shardcompute.core.settings import Settings
from shardcompute.core.units import format_bytes
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.admin.downloads import Fetches
from shardcompute.node.admin.dry_run import plan_model
from shardcompute.node.admin.feed import Feed
from shardcompute.node.admin.swap import given_way, models_in_the_way
from shardcompute.node.admin.views import (
    ClusterChange,
    ClusterView,
    CoordinatorView,
    LoadView,
    MemoryParts,
    apply_change,
    changes_between,
)
from shardcompute.node.coordinator.journal import RecordStatus
from shardcompute.node.coordinator.shared import KnownCoordinator
from shardcompute.node.telemetry.request_log import RequestLog
from shardcompute.wire import StageTiming
from support.models.plain_model import plain_model
from support.swarm.fake_cluster import H200, MODEL, NOW_S, FakeCluster, serving_cluster


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    return Settings(data_dir=tmp_path, offline=True)


@pytest.fixture
def cluster() -> FakeCluster:
    return serving_cluster(500, 500)


@pytest.fixture
def admin(cluster: FakeCluster, settings: Settings) -> Iterator[ClusterAdmin]:
    with ClusterAdmin(cluster, settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        yield admin


# The state


def test_state_shows_nodes_and_chains(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    cluster.pool.newest["org/tiny#1"] = [StageTiming("b", 0.1, 0.2, 0.3, 40)]
    cluster.coordinator.post(happened.LinkMeasured("b", "a", 0.01, 1e6))
    state = admin.state()
    assert [(node.id, node.name, node.status) for node in state.nodes] == [
        ("a", "A", "ready"),
        ("b", "B", "ready"),
    ]
    (model,) = state.models
    assert (model.name, model.status, model.ready_chains, model.wanted_chains) == (
        "org/tiny",
        "serving",
        1,
        1,
    )
    (chain,) = state.chains
    assert (chain.id, chain.epoch, chain.status) == ("org/tiny#1", 1, "ready")
    assert [(stage.node, stage.start, stage.stop) for stage in chain.stages] == [("a", 0, 3), ("b", 3, 6)]
    assert all(stage.is_loaded for stage in chain.stages)
    timing = {stage.node: stage.timing for stage in chain.stages}
    assert timing["a"] is None
    assert timing["b"] is not None
    assert (timing["b"].compute_s, timing["b"].received_bytes) == (0.2, 40)
    assert [node.used_bytes for node in state.nodes] == [stage.memory_bytes for stage in chain.stages]
    assert [(link.a, link.b, link.rtt_s) for link in state.links] == [("a", "b", 0.01)]


def test_devices_are_named_with_their_memory_and_what_is_of_no_use(
    admin: ClusterAdmin, cluster: FakeCluster
) -> None:
    cluster.join("c", memory_bytes=136 << 30, device_remark="it lies", **H200)
    node = admin.state().nodes[-1]
    assert (node.device, node.backend, node.device_label) == ("cuda:0", "torch", "NVIDIA H200")
    assert (node.device_bytes, node.memory_bytes, node.device_remark) == (140 << 30, 136 << 30, "it lies")
    [useless] = node.unused_devices
    assert (useless.label, useless.problem, useless.fix) == (
        "Old Card",
        "its driver is too old",
        "update its driver",
    )
    assert describe_device(node) == "cuda:0 NVIDIA H200, 140.0 GiB"
    trouble = "C: Old Card cannot be used, its driver is too old; update its driver"
    assert describe_trouble(node) == [trouble, "C: it lies"]
    status = "\n".join(describe_cluster(admin.state(), 200))
    assert "  C: cuda:0 NVIDIA H200, 140.0 GiB\n" in status
    assert trouble in status


def test_plans_name_devices(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    cluster.join("c", memory_bytes=136 << 30, **(H200 | {"seconds_per_byte": 1e-3}))
    plan = admin.plan("org/tiny", "int8")
    [stage] = plan.chains[0].stages
    assert (stage.device, stage.device_label, stage.device_bytes) == ("cuda:0", "NVIDIA H200", 140 << 30)
    assert "  C (NVIDIA H200, 140.0 GiB): layers 0 to 5" in plan.text


def test_nodes_are_in_the_order_of_their_names(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    before = admin.state()
    for id, name in (("x", "worker-10"), ("z", "worker-2"), ("y", "worker-2"), ("w", "attic")):
        cluster.join(id, name=name)
    after = admin.state()
    names = [(node.name, node.id) for node in after.nodes]
    workers = [("worker-2", "y"), ("worker-2", "z"), ("worker-10", "x")]
    assert names == [("A", "a"), ("B", "b"), ("attic", "w"), *workers]
    assert apply_change(before, changes_between(before, after)) == after


def test_state_predicts_and_names_the_bottleneck(admin: ClusterAdmin) -> None:
    (chain,) = admin.state().chains
    # 300 bytes in each stage, 50 in the head, a second for each byte.
    assert chain.predicted_tokens_per_s_one_stream == pytest.approx(1 / 650, rel=1e-3)
    assert chain.predicted_tokens_per_s_many == pytest.approx(1 / 350, rel=1e-3)
    assert "bottleneck: B" in chain.bottleneck
    assert [stage.predicted_s for stage in chain.stages] == [300, 350]


def test_the_bottleneck_is_that_of_the_step_whose_times_are_shown(
    admin: ClusterAdmin, cluster: FakeCluster
) -> None:
    cluster.pool.newest["org/tiny#1"] = [StageTiming("a", compute_s=0.9), StageTiming("b", compute_s=0.2)]
    (chain,) = admin.state().chains
    assert chain.bottleneck.startswith("bottleneck: A, 900.0 ms of 1.1 s of computing in the newest step")


def test_memory_of_weights_and_of_kv_are_told_apart(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    state = admin.state()
    kv_bytes = MODEL.kv_bytes_per_token_and_layer * MODEL.kv_tokens
    assert kv_bytes > 0
    for node in state.nodes:
        layers = sum(each.stop - each.start for each in node.layers)
        reserved = node.parts.kv_reserved_bytes
        assert reserved == layers * kv_bytes == sum(each.parts.kv_reserved_bytes for each in node.layers)
        assert reserved < node.parts.total_bytes == node.used_bytes


def test_one_model_reads_the_same_in_every_place(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    """In its own view, its chain's stages, its machines, a plan, and the words of the command line."""
    state = admin.state()
    (model,), (chain,) = state.models, state.chains
    plan = plan_model(cluster.coordinator.state, MODEL, 1, NOW_S)
    places = {
        "stages": [stage.parts for stage in chain.stages],
        "layers": [each.parts for node in state.nodes for each in node.layers],
        "nodes": [node.parts for node in state.nodes],
        "plan": [stage.parts for planned in plan.chains for stage in planned.stages],
    }
    assert model.parts == plan.parts
    for name, parts in places.items():
        summed = MemoryParts(
            held_weights_bytes=sum(each.held_weights_bytes for each in parts),
            scratch_bytes=sum(each.scratch_bytes for each in parts),
            kv_reserved_bytes=sum(each.kv_reserved_bytes for each in parts),
        )
        assert summed == model.parts, name
    assert model.memory_bytes == model.parts.total_bytes == plan.memory_bytes
    assert model.file_bytes == plan.file_bytes == sizes_of(MODEL).file_bytes
    told = "\n".join(describe_cluster(state, 120))
    assert f"file {format_bytes(model.file_bytes)}; in memory {describe_parts(model.parts)}" in told
    (heading, *rows) = describe_memory(plan)[1:]
    assert heading.split("  ")[0] == "MACHINE"
    assert format_bytes(plan.chains[0].stages[0].parts.held_weights_bytes) in rows[0]


def test_links_within_one_machine_are_called_local(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    cluster.join("c", address="tcp://127.0.0.1:9")
    for a, b in (("b", "a"), ("c", "head"), ("a", "head")):
        cluster.coordinator.post(happened.LinkMeasured(a, b, 1e-4, 1e9))
    links = {(link.a, link.b): link.is_local for link in admin.state().links}
    assert links == {("a", "b"): False, ("c", "head"): True, ("a", "head"): False}


def test_a_chain_that_lost_a_node_is_not_predicted(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    cluster.coordinator.post(happened.NodeLost("a", 1, "died", NOW_S))
    (chain,) = admin.state().chains
    assert chain.predicted_tokens_per_s_one_stream is None
    assert chain.bottleneck == ""
    assert [stage.fraction for stage in chain.stages] == [0.0, 1.0]


def test_loading_is_shown_and_is_never_complete_before_it_is(settings: Settings) -> None:
    cluster = FakeCluster()
    cluster.join("a")
    cluster.coordinator.post(happened.ModelRequested(MODEL, 1))
    cluster.coordinator.post(
        happened.ChainPlanned("org/tiny#1", "org/tiny", (happened.Assignment("a", 0, 6),))
    )
    cluster.coordinator.post(happened.ShardProgressed("a", 1, "org/tiny#1", 0, 6, 1.0))
    with ClusterAdmin(cluster, settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        state = admin.state()
    assert not state.chains[0].stages[0].is_loaded
    assert state.nodes[0].loading[0].fraction == 1.0
    assert state.models[0].status == "loading"


def test_a_model_that_does_not_fit_says_what_is_missing(settings: Settings) -> None:
    cluster = serving_cluster(300)
    with ClusterAdmin(cluster, settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        (model,) = admin.state().models
    assert model.status == "unservable"
    assert model.missing_bytes > 0
    assert model.reasons


# Requests


def test_requests_are_followed_from_the_queue_to_their_end() -> None:
    now = [0.0]
    log = RequestLog(clock=lambda: now[0], wall_clock=lambda: 5.0)
    with log.open("m", "m#1", GenerationRequest((0,) * 4, 1)) as entry:
        started = False
        entry.has_started = lambda: started
        assert log.views()[0].state == "waiting"
        started = True
        assert log.views()[0].state == "prefill"
        now[0] = 2.0
        entry.saw(Delta("a", (TokenChoice(1),)))
        now[0] = 4.0
        entry.saw(Delta("bc", (TokenChoice(2), TokenChoice(3))))
        (live,) = log.views()
        assert (live.state, live.generated_tokens, live.tokens_per_s) == ("decode", 3, 1.0)
        assert log.tokens_per_s() == 3 / 5
        entry.saw(Delta(finish="stop", timings=Timings(0.5, 1.5, 2.0, 4, 3)))
    now[0] = 50.0
    (done,) = log.views()
    assert (done.state, done.finish, done.queue_s, done.elapsed_s) == ("done", "stop", 0.5, 4.0)
    assert log.tokens_per_s() == 0.0


def test_time_waited_for_another_chain_is_booked_for_itself() -> None:
    now = [0.0]
    log = RequestLog(clock=lambda: now[0], wall_clock=lambda: 5.0)
    with log.open("m", "m#1", GenerationRequest((0,) * 4, 9)) as entry:
        now[0] = 1.0
        entry.saw(Delta("a", (TokenChoice(1),)))
        now[0] = 4.0
        told = Interruption(("attic",), ("cellar",), 2.5, 1)
        entry.saw(Delta("b", (TokenChoice(2),), interruption=told))
        (live,) = log.views()
        assert (live.decode_s, live.interrupted_s, live.interruptions) == (0.5, 2.5, (told,))
        timings = Timings(0.0, 1.0, 0.6, 4, 2, interrupted_s=2.5)
        entry.saw(Delta(finish="stop", timings=timings))
    (done,) = log.views()
    assert (done.decode_s, done.interrupted_s, done.interruptions) == (0.6, 2.5, (told,))


def test_requests_end_as_their_blocks_do() -> None:
    log = RequestLog()
    with pytest.raises(CapacityError), log.open("m", "m#1", GenerationRequest((0,) * 1, 1)):
        raise CapacityError("no room", hint="wait")
    with pytest.raises(GeneratorExit), log.open("m", "m#1", GenerationRequest((0,) * 1, 1)):
        raise GeneratorExit
    assert [(view.state, view.error) for view in log.views()] == [("cancelled", ""), ("failed", "no room")]


def test_only_the_last_requests_are_kept_and_all_that_run() -> None:
    log = RequestLog(size=2)
    running = [log.open("m", "m#1", GenerationRequest((0,) * 1, 1)) for _ in range(3)]
    for _ in range(5):
        with log.open("m", "m#1", GenerationRequest((0,) * 1, 1)):
            pass
    assert [view.id for view in log.views()] == ["3", "2", "1", "8", "7"]
    running[0].__exit__(None, None, None)
    assert [view.id for view in log.views()] == ["3", "2", "1", "8"]


# The feed


def _numbered(count: int) -> ClusterView:
    return ClusterView(name="home", version="1", url="", driver="d", load=LoadView(running=count))


def test_changes_put_together_give_the_state(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    views = [admin.state()]
    for event in (
        happened.NodeDrained("a"),
        happened.LinkMeasured("a", "b", 0.1, 1.0),
        happened.NodeLost("b", 1, "died", NOW_S),
        happened.ModelDropped("org/tiny"),
    ):
        cluster.coordinator.post(event)
        cluster.coordinator.settle()
        views.append(admin.state())
    for old, new in pairwise(views):
        change = changes_between(old, new)
        assert not change.is_empty
        assert apply_change(old, change) == new
        assert changes_between(new, new).is_empty
    assert "chains" in changes_between(views[0], views[-1]).gone


def test_warnings_come_and_go_with_changes() -> None:
    calm = _numbered(0)
    warned = replace(calm, warnings=("free some space",))
    led = replace(calm, coordinators=(CoordinatorView(node="a", status="leads", since_s=5.0),))
    for old, new in ((calm, warned), (warned, calm), (warned, led), (led, calm)):
        change = changes_between(old, new)
        assert not change.is_empty
        assert apply_change(old, change) == new


def test_coordinators_that_share_a_store_are_listed(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    assert admin.state().coordinators == ()
    cluster.known_coordinators = (
        KnownCoordinator("n-first", "http://10.0.0.1:8000", "leads", 5.0),
        KnownCoordinator("n-second", "", "away"),
    )
    assert admin.state().coordinators == (
        CoordinatorView(node="n-first", status="leads", api_url="http://10.0.0.1:8000", since_s=5.0),
        CoordinatorView(node="n-second", status="away"),
    )


def test_the_feed_tells_the_state_then_changes() -> None:
    count = [0]
    feed = Feed(lambda: _numbered(count[0]))
    woken: list[int] = []
    reader = feed.subscribe(lambda: woken.append(1))
    assert reader.take() == [_numbered(0)]
    feed.publish()
    assert (reader.take(), woken) == ([], [])
    for count[0] in (1, 2):
        feed.publish()
    assert [news.load for news in reader.take()] == [LoadView(running=1), LoadView(running=2)]
    assert len(woken) == 2
    feed.unsubscribe(reader)
    count[0] = 3
    feed.publish()
    assert len(woken) == 2


def test_a_slow_reader_gets_the_newest_state_instead_of_a_backlog() -> None:
    count = [0]
    feed = Feed(lambda: _numbered(count[0]), capacity=3)
    slow, quick = feed.subscribe(lambda: None), feed.subscribe(lambda: None)
    slow.take()
    for count[0] in range(1, 10):
        feed.publish()
        assert len(quick.take()) == 1
    assert slow.take() == [_numbered(9)]
    count[0] = 10
    feed.publish()
    assert isinstance(slow.take()[0], ClusterChange)


def test_there_is_a_limit_to_readers() -> None:
    feed = Feed(lambda: _numbered(0), most_readers=1)
    reader = feed.subscribe(lambda: None)
    with pytest.raises(QueueFullError):
        feed.subscribe(lambda: None)
    feed.unsubscribe(reader)
    feed.subscribe(lambda: None)


def test_what_the_coordinator_learns_wakes_readers(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    woken = threading.Event()
    reader = admin.subscribe(woken.set)
    reader.take()
    cluster.coordinator.post(happened.NodeDrained("a"))
    assert woken.wait(30)
    (change,) = reader.take()
    assert [node.is_draining for node in change.nodes] == [True]
    admin.unsubscribe(reader)


# Models


def test_plan_of_a_served_model(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    before = cluster.coordinator.state
    plan = admin.plan("org/tiny", "int8")
    (chain,) = plan.chains
    assert chain.is_possible
    assert [(stage.name, stage.start, stage.stop) for stage in chain.stages] == [("A", 0, 3), ("B", 3, 6)]
    assert chain.predicted_tokens_per_s_one_stream == pytest.approx(1 / 650, rel=1e-3)
    assert "plan for org/tiny" in plan.text
    assert "bottleneck" in plan.text
    assert cluster.coordinator.state is before


def test_a_chain_says_what_its_exactness_classes_promise(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    (chain,) = admin.state().chains
    assert (chain.is_mixed, chain.exactness) == (False, describe_exactness(["", ""], "native"))
    onnx, mlx = "onnx-1.31/float32/avx2", "mlx-0.32/bfloat16/metal Apple M4"
    cluster.join("a", 500, exactness=onnx)
    cluster.join("b", 500, exactness=mlx, backend="mlx", device="mlx")
    state = admin.state()
    assert [node.exactness for node in state.nodes] == [onnx, mlx]
    (chain,) = state.chains
    assert chain.is_mixed
    assert chain.exactness.startswith(f"mixes 2 exactness classes ({mlx}, {onnx}): logits within ")
    plan = admin.plan("org/tiny", "int8")
    assert plan.chains[0].exactness == describe_exactness([onnx, mlx], "int8")
    assert plan.chains[0].exactness in plan.text


def test_plan_of_several_chains_says_what_is_missing(admin: ClusterAdmin) -> None:
    first, second = admin.plan("org/tiny", "int8", chains=2).chains
    assert first.is_possible
    assert not second.is_possible
    assert second.missing_bytes > 0


@pytest.mark.parametrize(
    ("model", "form", "chains", "message"),
    [
        ("org/tiny", "int3", 1, "weight form"),
        ("org/tiny", "int8", 0, "at least one chain"),
        ("not a model", "int8", 1, "not the name of a model"),
    ],
)
def test_orders_that_cannot_be_meant(
    admin: ClusterAdmin, model: str, form: str, chains: int, message: str
) -> None:
    for ask in (admin.plan, admin.load_model):
        with pytest.raises(UsageError, match=message):
            ask(model, form, chains)
    assert admin.state().fetches == ()


@pytest.mark.parametrize(
    ("model", "name", "layers"),
    [("smollm2", "SmolLM2-135M-Instruct", 30), ("qwen3:8b", "Qwen/Qwen3-8B-GGUF", 36)],
)
def test_plan_of_a_model_of_the_catalogue_asks_nobody(
    admin: ClusterAdmin, monkeypatch: pytest.MonkeyPatch, model: str, name: str, layers: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a source was asked")

    monkeypatch.setattr("shardcompute.node.admin.dry_run.find_installed", lambda: None)
    monkeypatch.setattr("shardcompute.node.admin.dry_run.resolve", fail)
    planned = admin.plan(model)
    assert (planned.model, planned.layer_count) == (name, layers)
    assert not planned.chains[0].is_possible
    assert planned.chains[0].missing_bytes > 0
    smaller = admin.plan(model, "int4") if model == "qwen3:8b" else planned
    assert smaller.memory_bytes <= planned.memory_bytes


def _checkpoint(name: str = "org/new") -> Any:
    closed: list[bool] = []
    return SimpleNamespace(name=name, adapters=(), close=lambda: closed.append(True), closed=closed)


def _fetches(settings: Settings, open: Any, served: list[Any]) -> Fetches:
    def serve(checkpoint: Any, form: str, chains: int, progress: object) -> None:
        served.append((checkpoint.name, form, chains))

    return Fetches(settings, serve, lambda: None, open=open)


def test_a_fetch_tells_how_far_it_is_and_then_serves(settings: Settings) -> None:
    go, seen, served = threading.Event(), threading.Event(), []

    def open(reference: object, settings: Settings, progress: Any, fetch: str) -> Any:
        progress.start("model.gguf", 100)
        progress.advance(30)
        seen.set()
        assert go.wait(30)
        return _checkpoint()

    fetches = _fetches(settings, open, served)
    first = fetches.start("org/new", "int8", 2)
    assert (first.model, first.name, first.status) == ("org/new", "org/new", "fetching")
    assert seen.wait(30)
    (view,) = fetches.views()
    assert (view.doing, view.done_bytes, view.total_bytes) == ("model.gguf", 30, 100)
    assert fetches.start("org/new", "int8", 2) == view
    with pytest.raises(UsageError, match="already being fetched"):
        fetches.start("org/new", "int4", 2)
    with pytest.raises(UsageError, match="already being fetched"):
        fetches.start("org/new", "int8", 2, kv_type="int8")
    go.set()
    fetches.join()
    assert fetches.views() == ()
    assert served == [("org/new", "int8", 2)]


@pytest.mark.parametrize("error", [SourceError("no hub", hint="check the network"), ZeroDivisionError("x")])
def test_a_fetch_that_fails_stays_until_it_is_tried_again(
    settings: Settings, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: list[Any] = [error, _checkpoint()]

    def open(*_: object) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    served: list[Any] = []
    fetches = _fetches(settings, open, served)
    fetches.start("org/new", "native", 1)
    fetches.join()
    (view,) = fetches.views()
    assert view.status == "failed"
    assert ("no hub" if isinstance(error, SourceError) else "ZeroDivisionError") in view.error
    assert len(caplog.records) == (0 if isinstance(error, SourceError) else 1)
    fetches.start("org/new", "native", 1)
    fetches.join()
    assert fetches.views() == ()
    assert len(served) == 1


def test_a_fetch_can_be_called_off(settings: Settings) -> None:
    go, checkpoint, served = threading.Event(), _checkpoint(), []

    def open(reference: object, settings: Settings, progress: Any, fetch: str) -> Any:
        assert go.wait(30)
        return checkpoint

    fetches = _fetches(settings, open, served)
    fetches.start("org/new", "native", 1)
    threads = fetches._threads()
    assert fetches.cancel("org/new")
    assert not fetches.cancel("org/new")
    go.set()
    threads[0].join()
    assert (served, checkpoint.closed) == ([], [True])


def test_more_chains_of_a_served_model_need_no_second_opening(
    admin: ClusterAdmin, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, other = _checkpoint("org/tiny"), _checkpoint("org/tiny")
    monkeypatch.setattr(
        admin, "_size_of", lambda _, form, kv_type: plain_model(name="org/tiny", weight_form=form)
    )
    admin._serve(again, "int8", 2, None)  # type: ignore[arg-type]
    assert cluster.coordinator.state.models["org/tiny"].chain_count == 2
    assert (cluster.served, again.closed) == ([], [True])
    with pytest.raises(WouldReplaceError, match="org/tiny as it is served now, which is answering nothing"):
        admin._serve(other, "int4", 1, None)  # type: ignore[arg-type]
    assert (cluster.served, other.closed) == ([], [])
    admin.unload_model("org/tiny")
    admin._serve(other, "int4", 1, None)  # type: ignore[arg-type]
    assert (cluster.served, other.closed) == ([("org/tiny", "int4", 1)], [])


def test_a_model_that_was_never_ready_need_not_be_asked_for() -> None:
    cluster = serving_cluster(300)
    state = cluster.coordinator.state
    smaller = plain_model(name="org/tiny", weight_form="int4")
    assert models_in_the_way(state, smaller, NOW_S, lambda name: 0) == ()


def test_only_as_many_models_give_way_as_make_room() -> None:
    cluster = serving_cluster(1000)
    for name in ("org/busy", "org/idle"):
        cluster.coordinator.post(happened.ModelRequested(plain_model(name=name), 1))
    cluster.join("z", 2400)
    cluster.coordinator.settle()
    state, busy = cluster.coordinator.state, {"org/busy": 2}
    assert {chain.model for chain in state.live_chains()} == {"org/tiny", "org/busy", "org/idle"}
    largest = plain_model(name="org/new", kv_tokens=1000)

    def in_the_way(model: Any) -> tuple[str, ...]:
        return models_in_the_way(state, model, NOW_S, lambda name: busy.get(name, 0))

    assert in_the_way(plain_model(name="org/new")) == ()
    assert "org/busy" not in in_the_way(plain_model(name="org/new", kv_tokens=90))
    assert in_the_way(plain_model(name="org/new", kv_tokens=90)) != ()
    # Nobody is asked to give way to what will not fit even then.
    assert in_the_way(largest) == ()


def test_whoever_waits_for_answers_has_patience_and_can_be_stopped(cluster: FakeCluster) -> None:
    cluster.pool.running = {"org/tiny": 2}
    now, told = [0.0], []

    class Progress:
        def start(self, label: str, total_bytes: int | None) -> None:
            told.append(label)

        def advance(self, count_bytes: int) -> None:
            now[0] += 50.0
            if cluster.pool.paused != {"org/tiny": "org/new"}:
                raise AssertionError("new requests are taken")

        def finish(self) -> None: ...

    with given_way(cluster, ["org/tiny"], "org/new", Progress(), clock=lambda: now[0]):  # type: ignore[arg-type]
        assert not cluster.coordinator.state.models["org/tiny"].is_wanted
    assert told == ["waiting for 2 requests of org/tiny to be finished"]
    assert now[0] == 150.0
    assert cluster.pool.paused == {}


def test_unload_drops_what_is_served_and_nothing_else(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    with pytest.raises(UnknownModelError, match="org/tiny"):
        admin.unload_model("org/other")
    admin.unload_model("org/tiny")
    assert admin.state().models[0].status == "unloading"
    cluster.coordinator.settle()
    assert admin.state().models == ()
    with pytest.raises(UnknownModelError):
        admin.unload_model("org/tiny")


# Nodes


def test_drain_moves_layers_and_lets_the_node_leave(settings: Settings) -> None:
    cluster = serving_cluster(500, 500, 500)
    with ClusterAdmin(cluster, settings, clock=lambda: NOW_S) as admin:  # type: ignore[arg-type]
        used = {stage.node for stage in admin.state().chains[0].stages}
        node = min(used)
        assert admin.drain_node(node.upper()).is_draining
        cluster.coordinator.settle()
        state = admin.state()
        assert {stage.node for stage in state.chains[0].stages} == {"a", "b", "c"} - {node}
        assert {view.id: view.status for view in state.nodes}[node] == "gone"
        with pytest.raises(UsageError, match="gone already"):
            admin.drain_node(node)


def test_what_could_not_be_recorded_is_said(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    assert admin.state().warnings == ()
    assert admin.health().unrecorded == 0
    cluster.join("a")
    cluster.record_status = RecordStatus(3, "the coordinator's disk is full")
    assert "not on record yet: the coordinator's disk is full" in admin.revoke_node("a").node.status_reason
    [warning] = admin.state().warnings
    assert warning.startswith("3 changes of the cluster are not on record (the coordinator's disk is full)")
    assert admin.health().unrecorded == 3
    cluster.tell_of_record(cluster.record_status)
    cluster.tell_of_record(RecordStatus())
    admin.history.flush()
    said = [event.text for event in admin.history.recent()]
    assert said.index("what happens cannot be written down: the coordinator's disk is full") < said.index(
        "all that has happened is on record again"
    )


def test_revoked_nodes_are_gone_at_once(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    assert admin.revoke_node("a").node.status == "gone"
    assert cluster.revoked == ["a"]
    assert admin.state().chains[0].status == "recovering"


def test_nodes_are_found_by_id_name_and_beginning(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    cluster.join("ncafe01", name="laptop")
    cluster.join("ncafe02", name="laptop")
    assert admin.drain_node("ncafe01").id == "ncafe01"
    with pytest.raises(UsageError, match="ncafe01, ncafe02"):
        admin.drain_node("laptop")
    with pytest.raises(UsageError, match="could be any of"):
        admin.drain_node("ncafe")
    for unknown in ("nobody", ""):
        with pytest.raises(UsageError, match="no node"):
            admin.drain_node(unknown)
    cluster.coordinator.post(happened.NodeLost("ncafe02", 1, "died", NOW_S))
    assert admin.drain_node("laptop").id == "ncafe01"


def test_the_coordinator_is_not_thrown_out(admin: ClusterAdmin, cluster: FakeCluster) -> None:
    cluster.join("head")
    with pytest.raises(UsageError, match="coordinator itself"):
        admin.revoke_node("head")
    assert cluster.revoked == []


# Who may come in


def test_tokens_are_told_once(admin: ClusterAdmin) -> None:
    new = admin.create_token(life_s=3600, max_uses=2)
    (kept,) = admin.tokens()
    assert (kept.id, kept.state, kept.expires_at_s, kept.max_uses) == (new.id, "valid", 3600, 2)
    assert new.token not in repr((new, kept))
    admin.revoke_token(new.id)
    assert admin.tokens()[0].state == "revoked"
    with pytest.raises(UsageError):
        admin.revoke_token("feed")


def test_invitations_hold_the_token_where_no_server_sees_it(admin: ClusterAdmin) -> None:
    new = admin.create_token(max_uses=1, origin="HTTP://10.0.0.5:8000/")
    url, _, fragment = new.link.partition("#")
    assert (url, fragment) == ("http://10.0.0.5:8000/", f"/join/{new.token}")
    assert new.qr.startswith("<svg ")
    assert new.token not in repr(new)
    plain = admin.create_token()
    assert (plain.link, plain.qr) == ("", "")
    before = admin.tokens()
    for wrong in ("*", "javascript://x", "http://a/b", "http://a b", "", f"http://{'a' * 300}"):
        with pytest.raises(UsageError):
            admin.create_token(origin=wrong)
    assert admin.tokens() == before


def test_keys_open_until_they_are_revoked(admin: ClusterAdmin) -> None:
    new = admin.create_key("phone")
    (kept,) = admin.keys()
    assert (kept.id, kept.label, kept.is_revoked) == (new.id, "phone", False)
    assert new.key not in repr((new, kept))
    assert admin.find_key(new.key) is not None
    assert admin.find_key(f"{new.key}x") is None
    admin.revoke_key(new.id)
    with pytest.raises(AuthError, match="revoked"):
        admin.find_key(new.key)
    with pytest.raises(UsageError):
        admin.revoke_key("nothing1")
