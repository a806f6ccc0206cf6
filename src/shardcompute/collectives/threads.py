"""Ranks as threads of one process: for tests, and for models cut by rank within one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from shardcompute.collectives.fabric_group import FabricGroup, World
from shardcompute.collectives.fabrics.inproc import InprocHub
from shardcompute.collectives.topology import AUTO, TopologyChoice

Outcome = TypeVar("Outcome")


def thread_groups(
    size: int, topology: TopologyChoice = AUTO, *, hub: InprocHub | None = None, epoch: int = 1
) -> list[FabricGroup]:
    """A world of `size` ranks in this process, one group for each; each is used by a thread of its own. Formed again
    on the same `hub` it takes a higher epoch."""
    meeting = hub or InprocHub(size)
    return [FabricGroup(World(meeting.fabric(rank, epoch)), topology) for rank in range(size)]


def run_ranks(groups: list[FabricGroup], work: Callable[[FabricGroup], Outcome]) -> list[Outcome]:
    """`work` of every rank in a thread of its own; results by rank. Raises the first error that any rank met, once
    all are done: a rank that fails ends its world, so that none waits for it."""
    outcomes: dict[int, Outcome] = {}
    errors: list[BaseException] = []

    def run(group: FabricGroup) -> None:
        try:
            outcomes[group.rank] = work(group)
        except BaseException as error:
            errors.append(error)
            group.abort(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=run, args=(group,), name=f"rank {group.rank}", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [outcomes[group.rank] for group in groups]
