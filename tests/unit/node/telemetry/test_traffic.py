from __future__ import annotations

import pytest

from shardcompute.node.service import HopTraffic, StageWork
from shardcompute.node.telemetry import traffic as traffic_room
from shardcompute.node.telemetry.traffic import WireTraffic
from shardcompute.wire import StageTiming


def sent(node: str, codec: str = "", sent_bytes: int = 0) -> StageTiming:
    return StageTiming(node, codec=codec, sent_bytes=sent_bytes)


def test_bytes_add_up_by_hop_and_codec() -> None:
    traffic = WireTraffic()
    traffic.count([sent("a", "int8", 10), sent("b", "exact", 40), sent("c")])
    traffic.count([sent("a", "int8", 5), sent("b", "int8", 10), sent("c")])
    traffic.count([sent("alone")])
    assert traffic.hops() == (
        HopTraffic("a", "b", "int8", 2, 15),
        HopTraffic("b", "c", "exact", 1, 40),
        HopTraffic("b", "c", "int8", 1, 10),
    )


def test_inventions_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_room, "_MOST_HOPS", 3)
    traffic = WireTraffic()
    for number in range(10):
        traffic.count([sent(f"node-{number}", "exact", 1), sent("b")])
        traffic.count([sent("a", f"codec-{number}", 1), sent("b")])
    traffic.count([sent("node-0", "exact", 1), sent("b")])
    assert [(hop.sender, hop.size_bytes) for hop in traffic.hops()] == [
        ("node-0", 2),
        ("node-1", 1),
        ("node-2", 1),
    ]


def test_stages_add_up_by_chain_and_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_room, "_MOST_STAGES", 3)
    traffic = WireTraffic()
    ranked = StageTiming("b", -9.0, 1.0, exchange_s=0.25, slowest="c")
    step = [StageTiming("a", 0.25, 0.5, 0.125), ranked]
    traffic.count(step, "m#1")
    traffic.count(step, "m#1")
    traffic.count([StageTiming("a", compute_s=2.0)], "m#2")
    traffic.count([StageTiming("invented", compute_s=2.0)], "m#2")
    assert traffic.stages() == (
        StageWork("m#1", "a", 2, 0.5, 1.0, 0.25),
        StageWork("m#1", "b", 2, 0.0, 2.0, 0.0, 0.5, "c"),
        StageWork("m#2", "a", 1, 0.0, 2.0, 0.0),
    )
