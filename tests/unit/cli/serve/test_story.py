"""What whoever starts a worker is told: its way into the cluster and to work, and nothing while nothing happens."""

from __future__ import annotations

import itertools
from dataclasses import replace

from shardcompute.backends.devices import host_device
from shardcompute.cli.serve import story
from shardcompute.node.worker.worker import WorkerShard, WorkerView

NEW = WorkerView(device=host_device(), threads=2, memory_bytes=3 << 30, seconds_per_byte=1 / (8 << 30))
IN = replace(NEW, is_registered=True, was_registered=True)
SHARD = WorkerShard("m#1", "m", 12, 23)


def _told(*views: WorkerView) -> list[str]:
    return [line for before, after in itertools.pairwise(views) for line in story.next_lines(before, after)]


def _fetching(fraction: float) -> WorkerView:
    return replace(IN, loading=(replace(SHARD, fraction=fraction),))


def test_from_measured_to_work() -> None:
    assert story.opening(NEW) == "measured: 2 threads, 3.0 GiB of memory, 8.0 GiB/s of weights"
    held, working = replace(IN, held=(SHARD,)), replace(IN, held=(replace(SHARD, is_at_work=True),))
    assert _told(
        NEW, IN, _fetching(0.1), _fetching(0.42), _fetching(0.45), _fetching(1.0), held, working
    ) == [
        "in the cluster; waiting for work",
        "fetching layers 12 to 22 of m",
        "fetching layers 12 to 22 of m: 42%",
        "layers 12 to 22 of m: loaded, standing by",
        "layers 12 to 22 of m: at work",
    ]
    assert story.activity_line(_fetching(0.42)) == "fetching layers 12 to 22 of m: 42%"


def test_it_is_quiet_while_nothing_happens() -> None:
    working = replace(IN, held=(replace(SHARD, is_at_work=True),))
    assert _told(working, working, working) == []
    assert story.activity_line(working) == ""


def test_what_goes_wrong_and_what_ends_is_told_once() -> None:
    working = replace(IN, held=(replace(SHARD, is_at_work=True),))
    away = replace(working, is_registered=False)
    failed = replace(IN, problem="layers 12–22 of m could not be loaded: no memory")
    assert _told(working, away, away, working, IN, failed, failed) == [
        "the coordinator is out of reach; trying again",
        "back in the cluster",
        "layers 12 to 22 of m: not needed here any more",
        "layers 12–22 of m could not be loaded: no memory",
    ]
