"""Each action is started once, and what comes of it comes back as an event."""

from __future__ import annotations

from msgspec.structs import replace

from shardcompute.control import events as happened
from shardcompute.control.actions import (
    ActivateChain,
    ConnectChain,
    FenceChain,
    LoadShard,
    ProbeLink,
    ReleaseNode,
    ReportUnservable,
    RetireChain,
    SeedWeights,
    Source,
    StageAddress,
    UnloadShard,
)
from shardcompute.core.errors import LinkError
from shardcompute.node.rpc.commands import (
    Attach,
    Connect,
    Connected,
    FenceOff,
    HoldLayers,
    Leave,
    LoadLayers,
    Peer,
    Probe,
    Retire,
    UnloadLayers,
    Unservable,
    encode_answer,
)
from shardcompute.node.rpc.session_ids import Resumption, first_session
from support.swarm.fake_cluster import MODEL, serving_cluster

from .conftest import ORIGIN, Shell

CHAIN = f"{MODEL.name}#1"


def load(**changes: object) -> LoadShard:
    action = LoadShard(
        node="a", incarnation=1, chain="x#2", model=MODEL.name, start=0, stop=2, size_bytes=9, sources=()
    )
    return replace(action, **changes)


def connect(shell: Shell) -> ConnectChain:
    """What is asked for once the chain has a new epoch."""
    chain = shell.coordinator.state.chains[CHAIN]
    shell.coordinator.apply(happened.ChainReshaped(CHAIN, chain.epoch + 1, chain.stages))
    stages = tuple(StageAddress(s.node, f"tcp://{s.node}", s.start, s.stop) for s in chain.stages)
    return ConnectChain(
        chain=CHAIN,
        epoch=chain.epoch + 1,
        model=MODEL.name,
        stages=stages,
        used_stages=chain.stages,
        kv_tokens=5,
    )


def activate(action: ConnectChain) -> ActivateChain:
    return ActivateChain(
        chain=CHAIN, epoch=action.epoch, model=MODEL.name, stages=action.stages, kv_tokens=action.kv_tokens
    )


def test_an_action_that_is_under_way_is_not_started_again(shell: Shell) -> None:
    shell.begin(load())
    shell.begin(load(sources=(Source("b", "tcp://b", 0, 2),), is_standby=True))
    [command] = shell.pumps["a"].told(LoadLayers)
    assert command.sources == [ORIGIN], "the first one's"
    shell.begin(load(incarnation=2))
    assert len(shell.pumps["a"].told(LoadLayers)) == 2, "another life, another load"


def test_what_was_not_asked_for_in_between_may_be_asked_for_again(shell: Shell) -> None:
    shell.begin(load())
    shell.begin()
    shell.begin(load())
    assert len(shell.pumps["a"].told(LoadLayers)) == 2


def test_what_failed_may_be_asked_for_again(shell: Shell) -> None:
    shell.pumps["a"].answers[UnloadLayers] = "busy"
    action = UnloadShard("a", 1, CHAIN, 0, 3)
    shell.begin(action)
    assert shell.coordinator.applied == []
    del shell.pumps["a"].answers[UnloadLayers]
    shell.begin(action)
    assert shell.coordinator.applied == [happened.ShardUnloaded("a", 1, CHAIN, 0, 3)]


def test_nothing_is_done_for_a_model_that_is_not_open_yet(shell: Shell) -> None:
    shell.driver.unopened.add(MODEL.name)
    shell.begin(load())
    assert shell.pumps["a"].commands == []
    shell.driver.unopened.clear()
    shell.begin(load())
    assert len(shell.pumps["a"].told(LoadLayers)) == 1


def test_a_seed_fetches_once_and_whatever_comes_of_it_is_known(shell: Shell) -> None:
    seed = SeedWeights(
        node="a",
        incarnation=1,
        model=MODEL.name,
        start=0,
        stop=2,
        sources=(Source("b", "tcp://b", 0, 2),),
        bytes_per_s=9,
    )
    shell.begin(seed)
    shell.begin(replace(seed, sources=(), bytes_per_s=1))
    [command] = shell.pumps["a"].told(HoldLayers)
    assert (command.sources, command.bytes_per_s) == ([Peer("b", "tcp://b"), ORIGIN], 9)
    assert shell.coordinator.applied == [happened.WeightsSeeded("a", 1, MODEL.name, 0, 2)]
    shell.pumps["a"].answers[HoldLayers] = "the disk is full"
    shell.begin()
    shell.begin(seed)
    now_s = shell.coordinator.now_s()
    assert shell.coordinator.applied[1:] == [happened.SeedingFailed("a", 1, "the disk is full", now_s)]


def test_a_released_node_has_left(shell: Shell) -> None:
    shell.begin(ReleaseNode("a", 1))
    assert shell.pumps["a"].commands == [Leave()]
    assert shell.coordinator.applied == [happened.NodeLeft("a", 1)]


def test_a_fence_reaches_all_drivers_and_stages_once() -> None:
    hosting = serving_cluster(500)
    hosting.join("b", session_namespace=3)
    hosting.join("x", 0, role="driver", session_namespace=4)
    shell = Shell(hosting.coordinator.state)
    shell.begin(FenceChain(CHAIN, 1, ("a", "b")))
    assert shell.driver.commands == [FenceOff(CHAIN, 1)]
    for node in "abx":
        assert shell.pumps[node].told(FenceOff) == [FenceOff(CHAIN, 1)]
    assert shell.coordinator.applied == [happened.ChainFenced(CHAIN, 1)]


def test_a_retired_chain_is_retired_at_every_driver() -> None:
    others = serving_cluster(500, 500)
    others.join("x", 0, role="driver", session_namespace=4)
    shell = Shell(others.coordinator.state)
    shell.coordinator.apply(happened.ChainRetired(CHAIN, "no longer wanted"))
    shell.begin(RetireChain(CHAIN))
    assert shell.driver.commands == shell.pumps["x"].commands == [Retire(CHAIN)]
    assert shell.pumps["a"].commands == []
    assert shell.coordinator.state.chains[CHAIN].is_released


def test_a_driver_that_comes_late_hears_what_cannot_be_served(shell: Shell) -> None:
    report = ReportUnservable("head", 0, MODEL.name, 9, ("why",))
    shell.begin(report)
    pump = shell.connect("x")
    late = serving_cluster(500, 500)
    late.join("x", 0, role="driver", session_namespace=4)
    shell.coordinator.state = late.coordinator.state
    to_x = replace(report, driver="x", session_namespace=4)
    shell.begin(replace(report, reasons=("in other words",)), to_x)
    assert shell.driver.commands == [Unservable(MODEL.name, 9, ["why"], [])]
    assert pump.commands == [Unservable(MODEL.name, 9, ["why"], [])]


def test_probes_come_back_whether_they_got_through_or_not(shell: Shell) -> None:
    shell.coordinator.time_s = 7.0
    shell.pumps["b"].answers[Probe] = "no way"
    shell.begin(ProbeLink("a", "head"), ProbeLink("b", "a"))
    assert shell.pumps["a"].commands == [Probe([ORIGIN])]
    assert shell.pumps["b"].commands == [Probe([Peer("a", "tcp://a:1")])]
    probed = [happened.LinkProbed("a", "head", 7.0), happened.LinkProbed("b", "a", 7.0)]
    assert shell.coordinator.applied == probed


def test_an_epoch_is_connected_then_used_with_what_its_stages_know(shell: Shell) -> None:
    mine, foreign = first_session(77), first_session(5)
    known = encode_answer(Connected(True, {}, {mine: 4, foreign: 6}))
    for pump in shell.pumps.values():
        pump.answers[Connect] = known
    action = connect(shell)
    shell.begin(action)
    assert shell.coordinator.of(happened.ChainConnected) == [happened.ChainConnected(CHAIN, 2, 5)]
    shell.begin(activate(action))
    [attach] = shell.driver.told(Attach)
    assert (attach.epoch, attach.kv_tokens, attach.first.node) == (2, 5, action.stages[0].node)
    assert attach.resumption == Resumption({mine: 4}, held=frozenset({mine}))
    chain = shell.coordinator.state.chains[CHAIN]
    assert (chain.status, chain.used_stages) == ("ready", chain.stages)


def test_an_epoch_that_is_connected_again_knows_no_more_than_its_stages_do_now(shell: Shell) -> None:
    """A stage was started again after the first time: it holds nothing any more."""
    mine = first_session(77)
    for pump in shell.pumps.values():
        pump.answers[Connect] = encode_answer(Connected(True, {}, {mine: 69}))
    action = connect(shell)
    shell.begin(action)
    shell.pumps["b"].answers[Connect] = encode_answer(Connected(False))
    shell.begin(action)
    shell.begin(activate(action))
    [attach] = shell.driver.told(Attach)
    assert attach.resumption == Resumption({}, held=frozenset({mine}))


def test_a_chain_that_cannot_be_connected_gets_a_new_epoch(shell: Shell) -> None:
    shell.pumps["b"].answers[Connect] = "no way"
    shell.begin(connect(shell))
    assert shell.coordinator.of(happened.LinkBroken) == [], "somebody may have reported it already"
    shell.coordinator.time_s = 3.0
    shell.coordinator.wait()
    first = shell.coordinator.state.chains[CHAIN].nodes[0]
    assert shell.coordinator.of(happened.LinkBroken) == [happened.LinkBroken("head", first, 3.0)]
    assert shell.coordinator.state.chains[CHAIN].is_interrupted


def test_a_broken_link_is_not_reported_twice(shell: Shell) -> None:
    shell.driver.failures = [LinkError("nobody listens")]
    shell.begin(connect(shell))
    first = shell.coordinator.state.chains[CHAIN].nodes[0]
    shell.coordinator.apply(happened.LinkBroken("head", first, 1.0))
    shell.coordinator.wait()
    assert len(shell.coordinator.of(happened.LinkBroken)) == 1


def test_a_driver_that_cannot_use_an_epoch_is_asked_again_after_a_while(shell: Shell) -> None:
    action = connect(shell)
    shell.begin(action)
    shell.driver.failures = [LinkError("its link ended")]
    shell.begin(activate(action))
    shell.begin(activate(action))
    assert shell.driver.told(Attach) == [], "not yet"
    shell.coordinator.wait()
    shell.begin(activate(action))
    assert len(shell.driver.told(Attach)) == 1


def test_who_was_a_stage_before_forgets_its_sessions() -> None:
    reserve = serving_cluster(500, 500)
    reserve.join("c", 500)
    reserve.coordinator.settle()
    shell = Shell(reserve.coordinator.state)
    [standby] = shell.coordinator.state.chains[CHAIN].standbys
    action = connect(shell)
    shell.begin(action)
    shell.begin(activate(action))
    assert shell.pumps[standby.node].told(FenceOff) == [FenceOff(CHAIN, 1, forgets=True)]
    for stage in action.stages:
        assert shell.pumps[stage.node].told(FenceOff) == []


def loading(shell: Shell, fraction: float) -> None:
    shell.coordinator.apply(happened.ShardProgressed("a", 1, "x#2", 0, 2, fraction))


def test_a_load_that_comes_no_further_is_given_up(shell: Shell) -> None:
    shell.pumps["a"].answers[LoadLayers] = None
    shell.begin(load())
    loading(shell, 0.2)
    shell.coordinator.wait()
    loading(shell, 0.4)
    shell.coordinator.wait()
    assert shell.coordinator.of(happened.ShardFailed) == []
    shell.coordinator.wait()
    [failed] = shell.coordinator.of(happened.ShardFailed)
    assert "no further than 40% for 15 minutes" in failed.reason
    assert shell.coordinator.state.nodes["a"].is_refusing(MODEL.name, 1.0)


def test_a_load_that_nobody_wants_any_more_is_not_watched(shell: Shell) -> None:
    shell.pumps["a"].answers[LoadLayers] = None
    shell.begin(load())
    shell.begin()
    for _ in range(3):
        shell.coordinator.wait()
    assert shell.coordinator.of(happened.ShardFailed) == []
