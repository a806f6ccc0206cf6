"""An epoch is connected stage by stage; whoever replays comes last, and the driver dials when all are in place."""

from __future__ import annotations

import pytest

from shardcompute.control.actions import ConnectChain, StageAddress
from shardcompute.control.state import Assignment
from shardcompute.core.errors import LinkError
from shardcompute.node.coordinator.chain_connector import ConnectedEpoch, connect_epoch, wire_between
from shardcompute.node.rpc.commands import Connect, Connected, Wire, encode_answer
from shardcompute.node.rpc.session_ids import Resumption, first_session

from .conftest import Shell


def action(*nodes: str, used: str = "") -> ConnectChain:
    stages = [StageAddress(node, f"tcp://{node}", 2 * i, 2 * i + 2) for i, node in enumerate(nodes)]
    return ConnectChain(
        chain="m#1",
        epoch=2,
        model="m",
        stages=tuple(stages),
        used_stages=tuple(Assignment(node, 2 * i, 2 * i + 2) for i, node in enumerate(used)),
        kv_tokens=10,
    )


def connect(shell: Shell, wanted: ConnectChain) -> ConnectedEpoch:
    return connect_epoch(wanted, shell.driver, shell.registry, lambda a, b: Wire())


def test_stages_learn_their_neighbours(shell: Shell) -> None:
    connected = connect(shell, action("a", "b"))
    [first], [last] = (shell.pumps[node].told(Connect) for node in "ab")
    assert (first.previous_node, first.next.node, first.is_last) == ("head", "b", False)
    assert (last.previous_node, last.next.node, last.is_last) == ("a", "head", True)
    assert last.next.url == shell.driver.url
    assert (first.session_namespace, first.kv_tokens) == (77, 10)
    assert shell.driver.opened == [("m#1", 2)]
    assert connected.resumption is None, "nothing was in use before"


def test_whoever_replays_is_told_after_the_one_that_it_replays_to(shell: Shell) -> None:
    told: list[str] = []
    pumps = [shell.connect(node) for node in "abc"]
    for node, pump in zip("abc", pumps, strict=True):
        answer = pump._answer
        pump._answer = lambda *args, node=node, answer=answer: (told.append(node), answer(*args))  # type: ignore[method-assign, misc, assignment]
        pump.answers[Connect] = encode_answer(Connected(True, {5: 3}, {5: 4}))
    shell.driver.running = [5]
    connected = connect(shell, action("a", "c", "b", used="axb"))
    assert told == ["c", "b", "a"]
    assert [each.running for pump in pumps for each in pump.told(Connect)] == [[5], [], []]
    assert connected.resumption == Resumption({5: 3}, held=frozenset({5}))


def test_a_stage_that_fails_is_an_error_and_nobody_dials(shell: Shell) -> None:
    shell.pumps["b"].answers[Connect] = "it is not loaded here"
    with pytest.raises(LinkError, match="b: it is not loaded here"):
        connect(shell, action("a", "b"))
    assert shell.driver.opened == []


def test_each_driver_is_told_of_its_own_sessions_once() -> None:
    x, y = first_session(1), first_session(2)
    epoch = ConnectedEpoch(2, Resumption({x: 3, y: 4}, held=frozenset({x, y})))
    assert epoch.known_of(1) == Resumption({x: 3}, held=frozenset({x}))
    now = [Connected(True, {}, {y: 9}), Connected(True, {}, {y: 7})]
    assert epoch.resume(2, now) == Resumption({y: 4}, held=frozenset({y}))
    assert epoch.resume(2, now) == Resumption({y: 7}, held=frozenset({y})), "it has gone on since"
    assert ConnectedEpoch(2, None).resume(2, now) is None


def test_wires_tell_what_was_measured_and_what_can_be_read(shell: Shell) -> None:
    state = shell.coordinator.state
    assert wire_between(state, "auto", "a", "b") == Wire("auto", ("exact",))
    assert wire_between(state, "auto", "a", "head") == Wire("auto", ("exact",))
