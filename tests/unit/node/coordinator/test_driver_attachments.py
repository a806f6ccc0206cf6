"""Drivers on other machines are let in by every stage, then told; what goes wrong with one is tried again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shardcompute.control import Record, next_actions
from shardcompute.control import events as happened
from shardcompute.control.actions import AttachDriver, DetachDriver, ShareMemory
from shardcompute.control.drivers import driver_commands
from shardcompute.control.events import DriverAttached, DriverDetached, DriverHostFailed
from shardcompute.core.generation import Speculation
from shardcompute.node.coordinator.driver_attachments import Brief
from shardcompute.node.rpc.commands import (
    Admit,
    Attach,
    Connect,
    Dismiss,
    HostDriver,
    Introduce,
    NodeCommand,
    OfferedModel,
    Retire,
    Share,
)
from shardcompute.node.rpc.session_ids import Resumption
from support.swarm.fake_cluster import MODEL, FakeCluster, serving_cluster

from .conftest import Shell
from .test_executor import CHAIN, activate, connect

OFFERED = OfferedModel(
    name=MODEL.name,
    vocab_size=9,
    context_length=9,
    digest="",
    size_bytes=0,
    created_s=1,
    speculation=Speculation(),
)


def joined(cluster: FakeCluster) -> Shell:
    """A coordinator that has connected its chain, and has yet to deal with who came since."""
    shell = Shell(cluster.coordinator.state)
    shell.brief = Brief([OFFERED], b"keys")
    action = replace(connect(shell), kv_tokens=MODEL.kv_tokens)
    shell.begin(action)
    shell.begin(activate(action))
    shell.coordinator.applied.clear()
    return shell


@pytest.fixture
def shell() -> Shell:
    """With another driver, x."""
    cluster = serving_cluster(500, 500)
    cluster.join("x", 0, role="driver", session_namespace=4)
    return joined(cluster)


@pytest.fixture
def hosting() -> Shell:
    """With a worker, a, that is to host the driver."""
    cluster = serving_cluster(500, 500)
    cluster.join("a", 500, session_namespace=3, shards=cluster.coordinator.state.nodes["a"].shards)
    for event in distances(5000.0):
        cluster.coordinator.post(event)
    return joined(cluster)


def distances(home_s: float) -> list[happened.LinkMeasured]:
    """How far a and b, which are near each other, are from the coordinator; here a token takes minutes."""
    return [
        happened.LinkMeasured(a, b, s, 1e9)
        for a, b, s in (("a", "b", 0.001), ("a", "head", home_s), ("b", "head", home_s))
    ]


def due(shell: Shell, kind: type) -> list[AttachDriver | ShareMemory | DetachDriver]:
    return [each for each in driver_commands(shell.coordinator.state) if isinstance(each, kind)]  # type: ignore[misc]


def settle(shell: Shell) -> None:
    for _ in range(9):
        shell.coordinator.wait()
        actions = next_actions(shell.coordinator.state, 0.0)
        for action in actions:
            if isinstance(action, Record):
                shell.coordinator.apply(action.event)
        shell.begin(*(action for action in actions if not isinstance(action, Record)))


def attached(shell: Shell) -> set[tuple[str, int]]:
    chain = shell.coordinator.state.chains[CHAIN]
    return {(each.driver, each.kv_tokens) for each in chain.drivers if each.epoch == chain.epoch}


def test_first_the_own_driver_gives_memory_up_then_the_other_comes(shell: Shell) -> None:
    settle(shell)
    assert shell.driver.told(Share) == [Share(CHAIN, 2, 5)]
    for node in "ab":
        admits = [(each.driver.node, each.session_namespace) for each in shell.pumps[node].told(Admit)]
        assert admits == [("head", 77), ("x", 4)]
    [attach] = shell.pumps["x"].told(Attach)
    assert (attach.epoch, attach.kv_tokens, attach.resumption) == (2, 5, Resumption({}))
    assert attached(shell) == {("head", 5), ("x", 5)}


def test_a_stage_that_lets_nobody_in_is_asked_again(shell: Shell) -> None:
    settle(shell)
    shell.coordinator.apply(happened.LinkBroken("x", "a", 0.0))
    shell.pumps["b"].answers[Admit] = "not now"
    [action] = due(shell, AttachDriver)
    shell.begin(action)
    assert shell.coordinator.of(DriverAttached)[-1].epoch == 2, "that of before"
    assert attached(shell) == {("head", 5)}
    del shell.pumps["b"].answers[Admit]
    settle(shell)
    assert attached(shell) == {("head", 5), ("x", 5)}
    assert len(shell.pumps["x"].told(Attach)) == 2


def test_a_link_that_breaks_meanwhile_voids_the_attachment(shell: Shell) -> None:
    shell.begin(*driver_commands(shell.coordinator.state))
    pump = shell.pumps["x"]
    answer = pump._answer

    def lose_link(number: int, command: NodeCommand) -> None:
        shell.attachments.link_broke(happened.LinkBroken("a", "x", 0.0))
        answer(number, command)

    pump._answer = lose_link  # type: ignore[method-assign]
    shell.begin(*due(shell, AttachDriver))
    assert len(pump.told(Attach)) == 1
    assert attached(shell) == {("head", 5)}


def test_a_worker_that_hosts_gets_ready_and_is_handed_the_chain(hosting: Shell) -> None:
    settle(hosting)
    pump = hosting.pumps["a"]
    [ready] = pump.told(HostDriver)
    assert (ready.model, ready.chains) == (OFFERED, [CHAIN])
    assert pump.commands.index(ready) < pump.commands.index(pump.told(Attach)[0])
    assert hosting.driver.hosts == {CHAIN: "a"}


def test_a_worker_that_cannot_host_is_given_up_after_some_times(hosting: Shell) -> None:
    hosting.pumps["a"].answers[Attach] = "no tokenizer"
    settle(hosting)
    chain = hosting.coordinator.state.chains[CHAIN]
    assert len(hosting.coordinator.of(DriverHostFailed)) == hosting.coordinator.state.health.host_failures
    assert (chain.avoided, chain.driver_host, hosting.driver.hosts) == (("a",), "", {})


def test_a_host_is_nobodys_before_its_model_is_open(hosting: Shell) -> None:
    hosting.brief = Brief([], b"keys")
    settle(hosting)
    assert hosting.pumps["a"].told(HostDriver) == hosting.pumps["a"].told(Attach) == []
    assert len(hosting.coordinator.of(DriverHostFailed)) > 1


def test_a_driver_that_is_gone_is_forgotten_by_all_stages(shell: Shell) -> None:
    settle(shell)
    shell.coordinator.apply(happened.NodeLost("x", 1, "died", 0.0))
    settle(shell)
    for node in "ab":
        assert shell.pumps[node].told(Dismiss) == [Dismiss(CHAIN, 4)]
    assert shell.coordinator.of(DriverDetached) == [DriverDetached(CHAIN, "x", 4)]
    assert shell.pumps["x"].told(Retire) == [], "it is not there to be told"
    assert attached(shell) == {("head", 10)}, "and its memory is free"


def test_a_host_whose_driver_moves_home_forgets_it(hosting: Shell) -> None:
    settle(hosting)
    for event in distances(0.001):
        hosting.coordinator.apply(event)
    settle(hosting)
    assert hosting.driver.hosts == {}
    assert hosting.pumps["a"].told(Retire) == [Retire(CHAIN)]
    assert hosting.pumps["b"].told(Dismiss) == [Dismiss(CHAIN, 3)]


def test_a_host_that_cannot_be_handed_generations_is_attached_anew(hosting: Shell) -> None:
    settle(hosting)
    hosting.attachments.lost_host(CHAIN, "a")
    assert ("a", 5) not in attached(hosting)
    settle(hosting)
    assert len(hosting.pumps["a"].told(Attach)) == 2
    hosting.attachments.lost_host("no such chain", "a")
    hosting.attachments.lost_host(CHAIN, "nobody")


def test_drivers_are_introduced_to_what_is_served(shell: Shell) -> None:
    shell.attachments.introduce()
    shell.attachments.introduce("x")
    first, second = shell.pumps["x"].told(Introduce)
    assert (first.models, first.wanted, first.chains) == ([OFFERED], [MODEL.name], [CHAIN])
    assert second.version > first.version
    assert shell.pumps["a"].told(Introduce) == []


def test_an_epoch_that_is_over_takes_nobody_in(shell: Shell) -> None:
    settle(shell)
    shell.coordinator.apply(happened.LinkBroken("x", "a", 0.0))
    stale = due(shell, AttachDriver)
    action = connect(shell)
    shell.begin(action)
    shell.begin(*stale)
    assert len(shell.pumps["x"].told(Attach)) == 1, "that of before"
    assert len(shell.pumps["a"].told(Connect)) == 2


def test_namespaces_are_never_shared(shell: Shell) -> None:
    assert shell.ports.is_taken("y", 4)
    assert shell.ports.is_taken("y", shell.driver.session_namespace)
    assert not shell.ports.is_taken("x", 4), "it is its own"
    assert not shell.ports.is_taken("y", 5)
    assert not shell.ports.is_taken("y", 0), "a worker that hosts nothing has none"
