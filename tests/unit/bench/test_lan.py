"""An emulated LAN between ranks of one machine: frames are late by its delay, and by what they weigh."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from shardcompute.bench.collectives.lan import LanFabric, LanNotes, WallClock, WorkClock
from shardcompute.collectives import FabricGroup, InprocHub, World, run_ranks, thread_groups


def lan_groups(path: Path, ranks: int) -> tuple[LanNotes, list[FabricGroup]]:
    hub = InprocHub(ranks)
    groups = [
        FabricGroup(World(LanFabric(hub.fabric(rank), LanNotes.open(path, ranks), WallClock())))
        for rank in range(ranks)
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


def test_what_is_counted_is_not_waited_for(tmp_path: Path) -> None:
    """Ten seconds each way for nothing, as far as the ranks' clocks go."""
    path, hub = tmp_path / "lan", InprocHub(2)
    LanNotes.open(path, 2).become(20_000, 1000)

    def work(group: FabricGroup) -> float:
        clock = WorkClock()
        lan = LanFabric(hub.fabric(group.rank), LanNotes.open(path, 2), clock)
        slowed = FabricGroup(World(lan))
        slowed.all_reduce(np.zeros(8, np.float32))
        began_s, spent_s = clock.now_s(), lan.spent_s
        slowed.all_reduce(np.zeros(8, np.float32))
        took_s = clock.now_s() - began_s
        assert took_s >= lan.spent_s - spent_s >= 0.0
        return took_s

    started_s = time.perf_counter()
    took_s = run_ranks(thread_groups(2), work)
    assert time.perf_counter() - started_s < 5.0
    assert max(took_s) >= 9.9


def test_an_exchange_counts_as_the_least_of_its_kind() -> None:
    clock = WorkClock()
    costs = []
    for rounds in (20_000, 2_000_000):
        began_s = clock.now_s()
        sum(range(rounds))
        clock.exchanged(began_s, (1, 1, 64))
        costs.append(clock.now_s() - began_s)
    began_s = clock.now_s()
    sum(range(2_000_000))
    clock.exchanged(began_s, (2, 2, 64))
    assert costs[1] < 2 * costs[0] + 1e-3 < clock.now_s() - began_s
