"""Drivers beside the coordinator's own: who uses a chain, with what share, and who is nearest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control import next_actions
from shardcompute.control.drivers import kv_share, round_trip_s

Serving = Callable[..., Any]


def attached(cluster: Any) -> set[tuple[str, int, int]]:
    """Driver, range and share of those that use the chain."""
    chain = cluster.state.chains["m#1"]
    return {
        (each.driver, each.session_namespace, each.kv_tokens)
        for each in chain.drivers
        if each.epoch == chain.epoch
    }


def drive(cluster: Any, name: str, sessions: int) -> None:
    cluster.join(name, 0, role="driver", session_namespace=sessions, seconds_per_byte=None)


def test_a_driver_holds_nothing_and_disturbs_nothing(serving: Serving) -> None:
    cluster = serving(400, 400)
    shape, epoch = cluster.shape(), cluster.state.chains["m#1"].epoch
    drive(cluster, "x", 7)
    assert cluster.state.nodes["x"].status == "ready"
    done = cluster.settle()
    assert [type(action) for action in done] == [to_do.ShareMemory, to_do.AttachDriver]
    assert attached(cluster) == {("driver", 0, 5), ("x", 7, 5)}
    assert (cluster.shape(), cluster.state.chains["m#1"].epoch) == (shape, epoch)


def test_memory_is_given_up_before_it_is_given(serving: Serving) -> None:
    cluster = serving(400, 400)
    drive(cluster, "x", 7)
    cluster.settle()
    drive(cluster, "y", 8)
    due = [
        action
        for action in next_actions(cluster.state, 0.0)
        if not isinstance(action, to_do.ReportUnservable)
    ]
    assert [(type(each), each.driver, each.kv_tokens) for each in due] == [  # type: ignore[union-attr]
        (to_do.ShareMemory, "driver", 3),
        (to_do.ShareMemory, "x", 3),
    ]
    cluster.settle()
    assert attached(cluster) == {("driver", 0, 3), ("x", 7, 3), ("y", 8, 3)}


def test_what_a_lost_driver_held_is_freed_first(serving: Serving) -> None:
    cluster = serving(400, 400)
    drive(cluster, "x", 7)
    cluster.settle()
    cluster.lose("x")
    assert kv_share(cluster.state, cluster.state.chains["m#1"], "driver") == 10
    done = cluster.settle()
    assert [type(action) for action in done] == [to_do.DetachDriver, to_do.ShareMemory]
    assert attached(cluster) == {("driver", 0, 10)}
    assert cluster.state.chains["m#1"].status == "ready"


def test_another_process_of_the_same_driver_is_another_driver(serving: Serving) -> None:
    cluster = serving(400, 400)
    drive(cluster, "x", 7)
    cluster.settle()
    drive(cluster, "x", 9)
    assert [type(action) for action in cluster.settle()] == [to_do.DetachDriver, to_do.AttachDriver]
    drive(cluster, "x", 9)
    assert cluster.settle() == [], "it only registered again"


def test_a_new_shape_is_for_all(serving: Serving) -> None:
    cluster = serving(400, 400, 400)
    drive(cluster, "x", 7)
    cluster.settle()
    cluster.lose(cluster.shape()[0][0])
    cluster.settle()
    assert cluster.state.chains["m#1"].epoch == 2
    assert attached(cluster) == {("driver", 0, 5), ("x", 7, 5)}


def test_a_broken_link_of_a_driver_concerns_it_alone(serving: Serving) -> None:
    cluster = serving(400, 400)
    drive(cluster, "x", 7)
    drive(cluster, "y", 8)
    cluster.settle()
    first = cluster.shape()[0][0]
    for event in (happened.LinkBroken("x", first, 0.0), happened.LinkBroken(first, "x", 0.0)):
        cluster.tell(event)
        assert not cluster.state.chains["m#1"].is_interrupted
        assert ("x", 7, 3) not in attached(cluster)
        assert [action.driver for action in cluster.settle()] == ["x"]
    cluster.tell(happened.LinkBroken("driver", first, 0.0))
    assert cluster.state.chains["m#1"].is_interrupted, "without the coordinator's own there is no chain"


def test_how_far_it_is_round_the_chain(serving: Serving) -> None:
    cluster = serving(400, 400)
    chain = cluster.state.chains["m#1"]
    first, last = chain.nodes
    assert round_trip_s(cluster.state, chain, "x") is None
    for a, b, rtt_s in ((first, last, 0.02), ("x", first, 0.004), ("x", last, 0.006), ("driver", first, 0.2)):
        cluster.tell(happened.LinkMeasured(a, b, rtt_s, 1e6))
    far = round_trip_s(cluster.state, chain, "x")
    assert far is not None
    assert abs(far - 0.015) < 1e-12
    assert round_trip_s(cluster.state, chain, "driver") is None
    cluster.tell(happened.LinkMeasured("x", last, 0.006, 1e6, is_open=False))
    assert round_trip_s(cluster.state, chain, "x") is None


def test_attachments_are_not_written_down() -> None:
    event = happened.DriverAttached("m#1", 1, "x", 7, 5)
    assert not happened.is_journalled(event)
    assert happened.decode_event(msgspec.json.encode(event)) == event
