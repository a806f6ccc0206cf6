"""An emulated LAN between ranks of one machine: frames are late by its delay, and by what they weigh."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from shardcompute.bench.collectives.lan import LanFabric, LanNotes
from shardcompute.collectives import FabricGroup, InprocHub, World, run_ranks


def lan_groups(path: Path, ranks: int) -> tuple[LanNotes, list[FabricGroup]]:
    hub = InprocHub(ranks)
    groups = [
        FabricGroup(World(LanFabric(hub.fabric(rank), LanNotes.open(path, ranks)))) for rank in range(ranks)
    ]
    return LanNotes.open(path, ranks), groups


def seconds_of(groups: list[FabricGroup], count: int) -> float:
    def work(group: FabricGroup) -> float:
        group.barrier()
        started_s = time.perf_counter()
        total = group.all_reduce(np.full(count, 1.0, np.float32))
        assert total.tolist() == [float(group.size)] * count
        return time.perf_counter() - started_s

    return max(run_ranks(groups, work))


def test_frames_take_half_a_round_trip(tmp_path: Path) -> None:
    notes, groups = lan_groups(tmp_path / "lan", 3)
    notes.become(40, 1000)
    assert seconds_of(groups, 8) >= 0.020 - 0.001


def test_what_a_rank_sends_and_hears_shares_its_line(tmp_path: Path) -> None:
    """Two frames of 10,000 bytes, one after the other over 8 Mbit/s, and then the delay."""
    notes, groups = lan_groups(tmp_path / "lan", 3)
    notes.become(2, 8)
    assert seconds_of(groups, 2500) >= 0.021 - 0.001


def test_the_line_can_become_another_while_a_rank_waits(tmp_path: Path) -> None:
    notes, groups = lan_groups(tmp_path / "lan", 2)

    def work(group: FabricGroup) -> None:
        if group.rank == 0:
            notes.become(2, 1000)
            group.send(np.zeros(10_000, np.uint8), 1)
        else:
            assert group.receive(0).size == 10_000

    started_s = time.perf_counter()
    run_ranks(groups, work)
    assert time.perf_counter() - started_s < 5.0
