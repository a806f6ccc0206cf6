"""Whatever happens, in whatever order: beliefs stay sound, plans are exact, and the cluster comes to rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.control import (
    COORDINATOR,
    ClusterState,
    Event,
    Model,
    NodeCapacity,
    Placement,
    PlacementPolicy,
    Record,
    Replacement,
    Request,
    Unplaceable,
    apply,
    decode_event,
    encode_event,
    next_actions,
    place,
    place_chains,
    replace_stage,
    report_models,
)
from shardcompute.control import events as happened
from shardcompute.control.actions import (
    ActivateChain,
    AttachDriver,
    ConnectChain,
    CopyKv,
    DetachDriver,
    FenceChain,
    LoadShard,
    ProbeLink,
    ReleaseNode,
    ReportUnservable,
    RetireChain,
    SearchLayout,
    ShareMemory,
    UnloadShard,
)
from shardcompute.control.drivers import kv_share, live_drivers, round_trip_s
from shardcompute.control.placement.cost_model import score, stage_s
from shardcompute.control.placement.cuts import cut_for_latency, cut_for_throughput, slowest_s
from shardcompute.control.placement.replacement import cut_for_price, move_seconds
from shardcompute.control.sizes import memory_of, sizes_of, usual_holding
from shardcompute.control.state import Assignment, Chain, Shard, covers, is_loaded
from support.swarm.layout_searcher import search_layout
from support.swarm.small_placements import NAMES, every_cut, every_shape, fits, make_model, requests


@settings(max_examples=150, deadline=None)
@given(requests())
def test_cuts_are_those_of_brute_force(request: Request) -> None:
    sizes, order = request.sizes, request.offers
    possible = [edges for edges in every_cut(len(order), sizes.layer_count) if fits(order, sizes, edges)]
    fastest, shortest = cut_for_throughput(order, sizes), cut_for_latency(order, sizes)
    if not possible:
        assert fastest is None
        assert shortest is None
        return

    def total_s(edges: tuple[int, ...]) -> float:
        return sum(stage_s(sizes, offer, edges[i], edges[i + 1]) for i, offer in enumerate(order))

    assert fastest in possible
    assert shortest in possible
    least = min(slowest_s(order, sizes, edges) for edges in possible)
    assert slowest_s(order, sizes, fastest) <= least * (1 + 1e-6)
    assert total_s(shortest) <= min(map(total_s, possible)) * (1 + 1e-6)
    bounded = cut_for_latency(order, sizes, least)
    assert bounded in possible
    within = [total_s(edges) for edges in possible if slowest_s(order, sizes, edges) <= least * (1 + 1e-6)]
    assert total_s(bounded) <= min(within) * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(requests(most=3))
def test_placement_is_sound_and_no_shape_is_worth_more(request: Request) -> None:
    regulars = replace(request, offers=tuple(offer for offer in request.offers if not offer.is_standby))
    shapes = every_shape(regulars) or every_shape(request)
    placement = place(request)
    if not shapes:
        assert isinstance(placement, Unplaceable)
        assert placement.missing_bytes > 0
        return
    assert isinstance(placement, Placement)
    assert placement.assignments in shapes
    used, unused = placement.nodes, {node for node, _ in placement.unused}
    assert used | unused == {offer.node for offer in request.offers}
    assert not used & unused
    best = max(score(request, shape).score for shape in shapes)
    if request.policy.latency_weight in (0.0, 1.0):
        assert placement.score >= best * (1 - 1e-6)
    else:
        # Between the two extremes a handful of compromises is weighed, not all.
        assert placement.score >= best * 0.8


@settings(max_examples=100, deadline=None)
@given(requests(), st.randoms(use_true_random=False))
def test_one_more_machine_never_makes_it_worse_and_order_does_not_matter(request: Request, random) -> None:  # type: ignore[no-untyped-def]
    placement = place(request)
    shuffled = list(request.offers)
    random.shuffle(shuffled)
    assert place(replace(request, offers=tuple(shuffled))) == placement
    regulars = tuple(replace(offer, is_standby=False) for offer in request.offers)
    wider = place(replace(request, offers=regulars))
    narrower = place(replace(request, offers=regulars[:-1]))
    if isinstance(narrower, Placement):
        assert isinstance(wider, Placement)
        assert wider.score >= narrower.score * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(requests())
def test_a_machine_with_the_missing_bytes_makes_it_possible(request: Request) -> None:
    request = replace(request, links=())
    plan = place(request)
    if isinstance(plan, Unplaceable):
        # One more like most of those that are there.
        able = [
            offer for offer in request.offers if f"{offer.node} is too small" not in " ".join(plan.reasons)
        ]
        usual = usual_holding(offer.holding for offer in able or request.offers)
        helper = NodeCapacity("z", plan.missing_bytes, 1.0, holding=usual)
        assert isinstance(place(replace(request, offers=(*request.offers, helper))), Placement)


@settings(max_examples=60, deadline=None)
@given(requests(), st.integers(1, 3))
def test_copies_never_share_a_machine(request: Request, count: int) -> None:
    placements = [each for each in place_chains(request, count) if isinstance(each, Placement)]
    assert len(placements) <= count
    nodes = [node for each in placements for node in each.nodes]
    assert len(set(nodes)) == len(nodes)
    assert bool(placements) == isinstance(place(request), Placement)


@settings(max_examples=100, deadline=None)
@given(requests(), st.data())
def test_replacement_is_sound_and_with_no_horizon_moves_least(request: Request, data: st.DataObject) -> None:
    plan = place(request)
    if isinstance(plan, Unplaceable):
        return
    lost = data.draw(st.sampled_from(sorted(plan.nodes)))
    left = replace(request, offers=tuple(each for each in request.offers if each.node != lost))
    replacement = replace_stage(left, plan.assignments, {lost})
    possible = every_shape(left)
    assert isinstance(replacement, Replacement) == bool(possible)
    if isinstance(replacement, Replacement):
        assert replacement.stages in possible
        order = left.offers
        frugal = replace(left, policy=PlacementPolicy(horizon_s=0.0), model=untied(request.model), links=())
        cheapest = cut_for_price(frugal, order)
        in_order = [
            shape for shape in every_shape(frugal) if [s.node for s in shape] == sorted(s.node for s in shape)
        ]
        assert (cheapest is None) == (not in_order)
        if cheapest is not None:
            assert move_seconds(frugal, cheapest)[0] == min(move_seconds(frugal, s)[0] for s in in_order)


def untied(model: Model) -> Model:
    return make_model(model.layer_bytes, (model.embedding_bytes, model.head_bytes))


# --- events in any order ---

CHAINS = ("m#1", "m#2", "x")
node_ids = st.sampled_from(NAMES[:3])
incarnations = st.integers(1, 3)
times = st.floats(0, 100)
chain_ids = st.sampled_from(CHAINS)
epochs = st.integers(0, 4)
assignments = st.builds(Assignment, node_ids, st.integers(0, 3), st.integers(0, 4))
shapes = st.one_of(
    st.lists(assignments, max_size=3).map(tuple),
    st.permutations(NAMES[:3]).map(lambda n: (Assignment(n[0], 0, 2), Assignment(n[1], 2, 4))),
    node_ids.map(lambda n: (Assignment(n, 0, 4),)),
)
edges = st.sampled_from([(0, 2), (2, 4), (0, 4), (3, 1)])


@st.composite
def shard_events(draw: st.DrawFn) -> Event:
    start, stop = draw(edges)
    node, life, chain = draw(node_ids), draw(incarnations), draw(chain_ids)
    return draw(
        st.sampled_from(
            [
                happened.ShardProgressed(node, life, chain, start, stop, 0.5),
                happened.ShardLoaded(node, life, chain, "m", start, stop, 4),
                happened.ShardFailed(node, life, chain, "m", start, stop, "why", draw(times)),
                happened.ShardFailed(node, life, chain, "m", start, stop, "why", draw(times), 150),
                happened.MemoryRegained(node, life, 170, draw(st.booleans())),
                happened.ShardUnloaded(node, life, chain, start, stop),
            ]
        )
    )


joins = st.builds(
    happened.NodeJoined,
    node=node_ids,
    name=st.just("n"),
    role=st.sampled_from(["worker", "worker", "driver"]),
    session_namespace=st.sampled_from([7, 8]),
    address=st.just("tcp://x"),
    device=st.just("cpu"),
    memory_bytes=st.integers(0, 30),
    threads=st.just(1),
    version=st.just("1"),
    incarnation=incarnations,
    now_s=times,
    seconds_per_byte=st.sampled_from([None, 1.0]),
    shards=st.sampled_from([(), (Shard("m#1", "m", 0, 2, 4),), (Shard("x", "m", 0, 4, 9),)]),
)
any_event: st.SearchStrategy[Event] = st.one_of(
    joins,
    shard_events(),
    shard_events(),
    st.builds(happened.CoordinatorStarted, times),
    st.builds(happened.NodeSeen, node_ids, incarnations, times),
    st.builds(happened.NodeMeasured, node=node_ids, incarnation=incarnations, seconds_per_byte=st.just(2.0)),
    st.builds(happened.LinkMeasured, node_ids, node_ids, st.just(1.0), st.just(1.0), st.booleans()),
    st.builds(happened.LinkBroken, st.sampled_from([*NAMES[:3], COORDINATOR, "driver"]), node_ids, times),
    st.builds(happened.NodeSuspected, node_ids, incarnations, st.just("why"), times),
    st.builds(happened.NodeLost, node_ids, incarnations, st.just("why"), times),
    st.builds(happened.NodeDrained, node_ids),
    st.builds(
        happened.NodeRested, node_ids, st.integers(1, 3), st.sampled_from(["", "on battery"]), st.booleans()
    ),
    st.builds(happened.NodeLeft, node_ids, incarnations),
    st.builds(happened.ModelRequested, st.sampled_from([make_model((1,) * 4), make_model((2,) * 3)])),
    st.builds(happened.ModelDropped, st.just("m")),
    st.builds(happened.ChainPlanned, chain_ids, st.just("m"), shapes),
    st.builds(happened.ChainReshaped, chain_ids, epochs, shapes),
    st.builds(happened.MovePlanned, chain_ids, epochs, shapes, st.just("why"), st.booleans(), times),
    st.builds(happened.LayoutFound, chain_ids, epochs, shapes, times),
    st.builds(happened.MoveDropped, chain_ids, epochs, st.just("why"), times),
    st.builds(happened.StandbysChosen, chain_ids, epochs, st.lists(assignments, max_size=2).map(tuple)),
    st.builds(happened.ChainConnected, chain_ids, epochs),
    st.builds(happened.ChainReady, chain_ids, epochs),
    st.builds(happened.ChainFenced, chain_ids, epochs),
    st.builds(happened.ChainBroken, chain_ids, epochs, st.just(1), st.just("why")),
    st.builds(happened.ChainRetired, chain_ids, st.just("why")),
    st.builds(happened.ChainReleased, chain_ids),
    st.builds(happened.LinkClosed, node_ids, node_ids, times),
    st.builds(happened.LinkProbed, node_ids, node_ids, times),
    st.builds(happened.DriverAttached, chain_ids, epochs, node_ids, st.just(7), st.just(1)),
    st.builds(happened.DriverDetached, chain_ids, node_ids, st.just(7)),
    st.builds(happened.DriverPlaced, chain_ids, st.one_of(node_ids, st.just(""))),
    st.builds(happened.DriverHostFailed, chain_ids, node_ids, st.just(7)),
)
# A beginning after which the rest has something to bite on.
SERVING: tuple[Event, ...] = (
    *(
        happened.NodeJoined(
            node=name,
            name=name,
            role="worker",
            address="tcp://x",
            device="cpu",
            memory_bytes=30,
            threads=1,
            version="1",
            incarnation=1,
            now_s=0.0,
            seconds_per_byte=1.0,
        )
        for name in NAMES[:3]
    ),
    happened.ModelRequested(make_model((1,) * 4)),
    happened.ChainPlanned("m#1", "m", (Assignment("a", 0, 2), Assignment("b", 2, 4))),
    happened.ShardLoaded("a", 1, "m#1", "m", 0, 2, 4),
    happened.ShardLoaded("b", 1, "m#1", "m", 2, 4, 4),
    happened.ChainConnected("m#1", 1),
    happened.ChainReady("m#1", 1),
)


def check_integrity(state: ClusterState) -> None:
    for node in state.nodes.values():
        assert node.is_live or not (node.shards or node.loading)
    for chain in state.chains.values():
        if not chain.is_live:
            continue
        model = state.models[chain.model].model
        assert covers(chain.stages, model.layer_count)
        assert chain.connected_epoch <= chain.epoch
        assert chain.fenced_epoch <= chain.epoch_to_fence
        assert all(node in state.nodes for node in chain.nodes)
        assert all(state.nodes[standby.node].is_live for standby in chain.standbys)
        assert not set(chain.standbys) & set(chain.stages)
        if not chain.is_interrupted:
            assert all(state.nodes[node].is_live for node in chain.nodes)
        if chain.status == "ready":
            assert not chain.is_interrupted
            assert chain.connected_epoch == chain.epoch
            assert all(is_loaded(state, chain, stage) for stage in chain.stages)
            assert chain.used_stages == chain.stages
        if chain.status == "broken":
            assert chain.is_interrupted
        assert not set(chain.host_failures) & set(chain.avoided)
        assert all(
            chain.host_failures.count(node) < state.health.host_failures for node in chain.host_failures
        )
    for a, row in state.links.items():
        assert all(a < b for b in row)
        assert all(link.closed_by in (link.a, link.b) for link in row.values() if not link.is_open)
    for each in state.link_breaks:
        assert each.a < each.b
        assert each.reporter in (each.a, each.b)
        assert each.count > 0


@settings(max_examples=200, deadline=None)
@given(st.booleans(), st.lists(any_event, max_size=25))
def test_any_sequence_of_events_keeps_the_state_sound(is_serving: bool, events: list[Event]) -> None:
    state = ClusterState()
    for event in [*(SERVING if is_serving else ()), *events]:
        epochs_before = {id: chain.epoch for id, chain in state.chains.items()}
        before = encode_state(state)
        changed = apply(state, decode_event(encode_event(event)))
        assert encode_state(state) == before
        state = changed
        check_integrity(state)
        for id, chain in state.chains.items():
            assert chain.epoch >= epochs_before.get(id, 1)


def encode_state(state: ClusterState) -> bytes:
    encoded = msgspec.json.encode(state)
    assert msgspec.json.decode(encoded, type=ClusterState) == state
    return encoded


# --- a cluster that obeys ---


class Cluster:
    """Carries out actions at once; each load may fail as often as `failures` says."""

    def __init__(self, failures: dict[str, int]) -> None:
        self.state = ClusterState(placing=PlacementPolicy(least_lifetime_s=0.0))
        self.now_s = 0.0
        self.failures = dict(failures)

    def tell(self, *events: Event) -> None:
        for event in events:
            self.state = apply(self.state, event)
            check_integrity(self.state)

    def join(self, name: str, memory_bytes: int, seconds_per_byte: float) -> None:
        old = self.state.nodes.get(name)
        self.tell(
            happened.NodeJoined(
                node=name,
                name=name,
                role="worker",
                address=f"tcp://{name}",
                device="cpu",
                memory_bytes=memory_bytes,
                threads=1,
                version="1",
                incarnation=old.incarnation + 1 if old else 1,
                now_s=self.now_s,
                seconds_per_byte=seconds_per_byte,
                session_namespace=100 + NAMES.index(name),
            )
        )

    def drive(self, name: str, sessions: int) -> None:
        old = self.state.nodes.get(name)
        self.tell(
            happened.NodeJoined(
                node=name,
                name=name,
                role="driver",
                address=f"tcp://{name}",
                device="cpu",
                memory_bytes=0,
                threads=1,
                version="1",
                incarnation=old.incarnation + 1 if old else 1,
                now_s=self.now_s,
                session_namespace=sessions,
            )
        )

    def answer(self, action: object) -> None:
        match action:
            case Record(event):
                before = self.state
                self.tell(event)
                assert self.state != before
            case LoadShard():
                self._load(action)
            case UnloadShard(node, life, chain, start, stop):
                self.tell(happened.ShardUnloaded(node, life, chain, start, stop))
            case ConnectChain(chain=chain, epoch=epoch):
                self.tell(happened.ChainConnected(chain, epoch))
            case CopyKv(chain=chain, epoch=epoch):
                self.tell(happened.KvCopied(chain, epoch, tuple(each.assignment for each in action.target)))
            case ActivateChain(chain=chain, epoch=epoch):
                self.tell(happened.ChainReady(chain, epoch))
            case SearchLayout():
                self.tell(search_layout(self.state, action, self.now_s))
            case RetireChain(chain):
                self.tell(happened.ChainReleased(chain))
            case ProbeLink(node, peer):
                self.tell(happened.LinkProbed(node, peer, self.now_s))
            case FenceChain(chain, epoch):
                self.tell(happened.ChainFenced(chain, epoch))
            case ReleaseNode(node, life):
                self.tell(happened.NodeLeft(node, life))
            case AttachDriver() | ShareMemory():
                place = (action.chain, action.epoch, action.driver, action.session_namespace)
                self.tell(happened.DriverAttached(*place, action.kv_tokens))
                self.check_shares()
            case DetachDriver():
                self.tell(happened.DriverDetached(action.chain, action.driver, action.session_namespace))

    def check_shares(self) -> None:
        """Nobody is promised memory that another still has."""
        for chain in self.state.live_chains():
            current = [each.kv_tokens for each in chain.drivers if each.epoch == chain.epoch]
            assert sum(current) <= self.state.models[chain.model].model.kv_tokens

    def _load(self, action: LoadShard) -> None:
        node, life, span = action.node, action.incarnation, (action.start, action.stop)
        if self.failures.get(node, 0) > 0:
            self.failures[node] -= 1
            # Every second time it was for want of memory, of which it offers less then.
            memory = self.state.nodes[node].memory_bytes * 3 // 4 if self.failures[node] % 2 else None
            place = (node, life, action.chain, action.model, *span)
            self.tell(happened.ShardFailed(*place, "why", self.now_s, memory))
            return
        held = sum(shard.size_bytes for shard in self.state.nodes[node].shards)
        assert held + action.size_bytes <= self.state.nodes[node].memory_bytes, "memory exceeded"
        self.tell(happened.ShardLoaded(node, life, action.chain, action.model, *span, action.size_bytes))

    def settle(self) -> None:
        for _ in range(60):
            # Everybody who is not dead keeps saying so.
            for node in self.state.nodes.values():
                if node.is_live:
                    self.tell(happened.NodeSeen(node.id, node.incarnation, self.now_s))
            actions = next_actions(self.state, self.now_s)
            assert next_actions(self.state, self.now_s) == actions
            if all(isinstance(action, ReportUnservable) for action in actions):
                return
            records = [action for action in actions if isinstance(action, Record)]
            for record in records:
                self.answer(record)
            assert next_actions(self.state, self.now_s) == actions[len(records) :]
            for action in actions[len(records) :]:
                self.answer(action)
        raise AssertionError(f"does not come to rest: {actions}")

    def check_rest(self) -> None:
        for report in report_models(self.state, self.now_s):
            assert report.status in ("serving", "unservable")
            if report.ready_chains < report.wanted_chains:
                assert report.missing_bytes > 0
                assert report.reasons
        for node in self.state.nodes.values():
            claims = [
                memory_of(self.state, self.state.models[chain.model].model, claim)
                for chain in self.state.live_chains()
                if not chain.is_interrupted
                for claim in chain.claims
                if claim.node == node.id
            ]
            assert sum(claims) <= node.memory_bytes
            assert all(shard.chain in self.state.chains for shard in node.shards)
        assert all(chain.status in ("ready", "broken") for chain in self.state.chains.values())
        assert all(each.count < self.state.health.link_breaks for each in self.state.link_breaks)
        for link in (link for row in self.state.links.values() for link in row.values() if not link.is_open):
            ends = {link.a, link.b} - {self.state.driver}
            nodes = [self.state.nodes[end] for end in ends if end in self.state.nodes]
            are_there = len(nodes) == len(ends) and all(node.is_answering for node in nodes)
            is_due = are_there and self.now_s >= link.probe_at_s
            assert not is_due, "a closed link is never left alone for good"
        for chain in self.state.live_chains():
            if chain.status == "ready":
                self._check_drivers(chain)

    def _check_drivers(self, chain: Chain) -> None:
        drivers = {(node.id, node.session_namespace) for node in live_drivers(self.state)} | {
            (self.state.driver, 0)
        }
        if chain.driver_host:
            host = self.state.nodes[chain.driver_host]
            assert host.status == "ready"
            drivers.add((host.id, host.session_namespace))
            home, there = (round_trip_s(self.state, chain, node) for node in (self.state.driver, host.id))
            assert home is not None
            assert there is not None
            assert there < home
        assert {(each.driver, each.session_namespace) for each in chain.drivers} == drivers
        assert {each.epoch for each in chain.drivers} == {chain.epoch}
        for each in chain.drivers:
            assert each.kv_tokens == kv_share(self.state, chain, each.driver)
        self.check_shares()


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, str, int, float]:
    kinds = [
        "join",
        "join",
        "die",
        "drain",
        "rest",
        "link",
        "restart",
        "model",
        "drop",
        "wait",
        "drive",
        "stop driving",
        "measure",
    ]
    kind = draw(st.sampled_from(kinds))
    return (
        kind,
        draw(st.sampled_from(NAMES)),
        draw(st.integers(4, 40)),
        draw(st.sampled_from([0.5, 1.0, 4.0])),
    )


def take(cluster: Cluster, step: tuple[str, str, int, float]) -> None:
    kind, name, size, speed = step
    node = cluster.state.nodes.get(name)
    life = node.incarnation if node else 1
    cluster.now_s += 0.1
    if kind == "join":
        cluster.join(name, size, speed)
    elif kind == "die":
        cluster.tell(happened.NodeLost(name, life, "died", cluster.now_s))
    elif kind == "drive":
        cluster.drive(f"d{size % 3}", size)
    elif kind == "stop driving":
        driver = cluster.state.nodes.get(f"d{size % 3}")
        if driver is not None:
            cluster.tell(happened.NodeLost(driver.id, driver.incarnation, "died", cluster.now_s))
            cluster.tell(happened.LinkBroken(name, f"d{(size + 1) % 3}", cluster.now_s))
    elif kind == "drain":
        cluster.tell(happened.NodeDrained(name))
    elif kind == "rest":
        cluster.tell(happened.NodeRested(name, life, "on battery" if size % 3 else "", size % 2 == 0))
    elif kind == "link":
        other = [*NAMES, cluster.state.driver][size % (len(NAMES) + 1)]
        cluster.tell(
            happened.LinkMeasured(name, other, speed, 1e6, size % 5 > 0),
            happened.LinkBroken(name, other, cluster.now_s),
        )
    elif kind == "restart":
        cluster.tell(happened.CoordinatorStarted(cluster.now_s))
    elif kind == "model":
        model = make_model((size % 4 + 1,) * (size % 7 + 1), (size % 3, size % 5), name=f"m{size % 2}")
        cluster.tell(happened.ModelRequested(model, 1 + size % 2))
    elif kind == "drop":
        cluster.tell(happened.ModelDropped(f"m{size % 2}"))
    elif kind == "measure":
        # Far from the coordinator, or near it; and at some distance from each other.
        for number, each in enumerate(NAMES):
            cluster.tell(happened.LinkMeasured(each, cluster.state.driver, speed * (1 + size % 3), 1e6))
            for other in NAMES[:number]:
                cluster.tell(happened.LinkMeasured(each, other, 0.01 * size, 1e6))
    else:
        cluster.now_s += 5000.0
        for each in cluster.state.nodes.values():
            if each.is_live:
                cluster.tell(happened.NodeSeen(each.id, each.incarnation, cluster.now_s))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(steps(), min_size=1, max_size=14),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 2), max_size=2),
    st.integers(0, 3),
)
def test_joins_deaths_and_loads_come_to_rest_with_models_served_or_reported(
    story: list[tuple[str, str, int, float]], failures: dict[str, int], patience: int
) -> None:
    cluster = Cluster(failures)
    cluster.tell(happened.ModelRequested(make_model((2,) * 6, (2, 3), name="m0")))
    for number, step in enumerate(story):
        take(cluster, step)
        if number % (patience + 1) == 0:
            cluster.settle()
            cluster.check_rest()
        elif patience:
            # Only some of what is due gets done before the next thing happens.
            for action in next_actions(cluster.state, cluster.now_s)[: patience + 1]:
                cluster.answer(action)
    cluster.settle()
    cluster.check_rest()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(8, 30), st.sampled_from([0.5, 2.0])), min_size=2, max_size=5), st.data()
)
def test_a_served_model_is_served_again_when_the_dead_return(
    machines: list[tuple[int, float]], data: st.DataObject
) -> None:
    cluster = Cluster({})
    for name, (size, speed) in zip(NAMES, machines, strict=False):
        cluster.join(name, size, speed)
    cluster.tell(happened.ModelRequested(make_model((2,) * 6, (2, 3))))
    cluster.settle()
    if report_models(cluster.state, 0.0)[0].status != "serving":
        return
    dead = data.draw(st.sets(st.sampled_from(NAMES[: len(machines)]), min_size=1))
    for name in sorted(dead):
        cluster.tell(happened.NodeLost(name, cluster.state.nodes[name].incarnation, "died", 0.0))
    cluster.settle()
    cluster.check_rest()
    for name in sorted(dead):
        cluster.join(name, *machines[NAMES.index(name)])
    cluster.settle()
    assert report_models(cluster.state, 0.0)[0].status == "serving"


def test_sizes_add_up_over_any_cut() -> None:
    model = make_model((3, 5, 7, 2), (11, 13))
    sizes = sizes_of(model).on("")
    for first, second in product(range(1, 4), range(1, 4)):
        if first < second:
            parts = [sizes.memory_bytes(0, first), sizes.memory_bytes(first, second)]
            assert sum(parts) + sizes.memory_bytes(second, 4) == sizes.total_bytes
