"""Whom a stage hears, whom it answers, and how much of its memory each driver may use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shardcompute.control.events import NodeJoined
from shardcompute.control.state import UnusedDevice
from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import CapacityError
from shardcompute.core.generation import Sampling
from shardcompute.node.coordinator.validation import validate_join, validate_role
from shardcompute.node.rpc.commands import Admit, Connect, Peer
from shardcompute.node.rpc.session_ids import Resumption, choose_namespace, first_session, namespace_of
from shardcompute.node.worker.stages.slot import StageRoute, StageSlot, sessions_in
from shardcompute.security.names import Role
from shardcompute.wire import SegmentHeader, StepFrame, open_session, pack_ids

OWN, X, Y = (Peer(name, f"tcp://{name}:1") for name in ("head", "x", "y"))
OF_OWN, OF_X, OF_Y = (first_session(number) for number in (1, 2, 3))


def route(previous: str) -> StageRoute:
    command = Connect(
        chain="m#1",
        epoch=1,
        start=0,
        stop=1,
        next=Peer("next", "tcp://next:1"),
        previous_node=previous,
        driver=OWN,
        session_namespace=1,
        kv_tokens=4 * PAGE_TOKENS,
        is_last=False,
    )
    return StageRoute.of(command).with_driver(admit(X, 2, 2 * PAGE_TOKENS))


def admit(driver: Peer, namespace: int, kv_tokens: int) -> Admit:
    return Admit(chain="m#1", epoch=1, driver=driver, session_namespace=namespace, kv_tokens=kv_tokens)


def frame(session: int, sequence: int, width: int = 0) -> StepFrame:
    return StepFrame("m#1", 1, sequence, [SegmentHeader(session, 0, 1, 1, pack_ids([1]))], 1, width, "")


def test_the_first_stage_hears_drivers_of_their_own_sessions() -> None:
    first = route(OWN.node)
    assert first.hears("head", [OF_OWN])
    assert first.hears("x", [OF_X, OF_X + 1])
    assert not first.hears("x", [OF_OWN])
    assert not first.hears("x", [OF_X, OF_OWN]), "a frame is one driver's"
    assert not first.hears("head", [OF_X])
    assert not first.hears("y", [OF_Y])
    assert first.may_end("x", [OF_X])
    assert not first.may_end("x", [OF_OWN])


def test_others_hear_the_stage_before() -> None:
    second = route("stage")
    assert second.hears("stage", [OF_X])
    assert not second.hears("stage", [OF_Y])
    assert second.hears("stage", [OF_Y], is_replay=True), "its driver may be on its way"
    assert not second.hears("stranger", [OF_X])
    assert second.may_end("stage", [OF_OWN, OF_X, OF_Y])


def test_who_is_dismissed_is_forgotten() -> None:
    without = route("stage").without_driver(2)
    assert not without.hears("stage", [OF_X])
    assert not without.hears("stage", [OF_X], is_replay=True), "what is on its way is too late"
    assert X not in without.peers()
    assert without.with_driver(admit(X, 2, 32)).hears("stage", [OF_X])


def test_nobody_begins_with_what_another_asked() -> None:
    opened = open_session(OF_X, Sampling(), 9)
    own = msgspec.structs.replace(opened, prefix_source=OF_X + 1, prefix_length=8)
    stolen = msgspec.structs.replace(opened, prefix_source=OF_OWN, prefix_length=8)
    first = route(OWN.node)
    for opening, is_heard in ((opened, True), (own, True), (stolen, False)):
        asked = msgspec.structs.replace(frame(OF_X, 1), opens=[opening])
        assert first.hears("x", sessions_in(asked)) is is_heard


def test_shares() -> None:
    first = route(OWN.node)
    page = PAGE_TOKENS
    first.check_share({OF_X: page}, {OF_OWN: 9 * page, OF_X + 1: 1})
    with pytest.raises(CapacityError, match="share"):
        first.check_share({OF_X: page + 1}, {OF_X + 1: 1})
    first.check_share({OF_X: page}, {OF_X: 9 * page})
    first.without_driver(2).check_share({OF_OWN: 10_000}, {})


def test_what_comes_late_is_outdated() -> None:
    slot = StageSlot("m#1", SimpleNamespace(), route(OWN.node), SimpleNamespace())  # type: ignore[arg-type]
    assert not slot.is_outdated(frame(OF_X, 5))
    assert slot.is_outdated(frame(OF_X, 4))
    assert slot.is_outdated(frame(OF_X, 5))
    assert not slot.is_outdated(frame(OF_OWN, 1)), "drivers count for themselves"
    assert not slot.is_outdated(frame(OF_X, 1, width=8)), "among stages nothing is overtaken"
    assert slot.driver_of(frame(OF_X, 1)) == X


def test_ranges_do_not_meet() -> None:
    chosen = choose_namespace()
    assert namespace_of(first_session(chosen)) == chosen == namespace_of(first_session(chosen) + (1 << 31))
    assert first_session(chosen) < 1 << 63
    known = Resumption({OF_X: 3, OF_Y: 4}, True, frozenset({OF_X, OF_Y, OF_Y + 1}))
    assert known.within(3) == Resumption({OF_Y: 4}, True, frozenset({OF_Y, OF_Y + 1}))
    assert Resumption(None).within(3) == Resumption(None)


def joined(**changes: Any) -> NodeJoined:
    fields: dict[str, Any] = {
        "node": "n",
        "name": "porch",
        "role": "driver",
        "address": "tcp://127.0.0.1:1",
        "device": "cpu",
        "memory_bytes": 0,
        "threads": 1,
        "version": "1",
        "incarnation": 0,
        "now_s": 0.0,
        "session_namespace": 7,
        "api_url": "http://porch:8000",
    }
    return NodeJoined(**{**fields, **changes})


def test_what_nodes_say_of_their_devices_is_judged() -> None:
    useless = UnusedDevice("cuda:1", "Old Card", "old", "update it", 2 << 30)
    assert validate_join(joined(device_label="H200", device_bytes=1 << 40, unused_devices=(useless,))) is None
    for changes in (
        {"backend": ""},
        {"device_label": "\x1b[31m"},
        {"device_bytes": -1},
        {"device_bytes": 1 << 60},
        {"device_remark": "x" * 1000},
        {"unused_devices": (useless,) * 100},
        {"unused_devices": (msgspec.structs.replace(useless, fix="a\nb"),)},
        {"unused_devices": (msgspec.structs.replace(useless, memory_bytes=-1),)},
    ):
        assert validate_join(joined(**changes)) is not None, changes


def test_what_drivers_say_of_themselves_is_judged() -> None:
    assert validate_join(joined()) is None
    for changes in (
        {"memory_bytes": 5},
        {"session_namespace": 1 << 31},
        {"session_namespace": -1},
        {"api_url": "a\nb"},
    ):
        assert validate_join(joined(**changes)) is not None
    assert validate_role("driver", {Role.DRIVER}) is None
    assert validate_role("worker", {Role.DRIVER}) == "its certificate is not that of a worker"
    assert validate_role("driver", {Role.WORKER}) == "its certificate is not that of a driver"
