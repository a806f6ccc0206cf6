"""Every fabric carries the same: within a process, over TCP, under TLS, through local sockets."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from shardcompute.collectives import Algorithm, Array, FabricGroup, TopologyChoice, run_ranks, thread_groups
from shardcompute.collectives.fabrics.link_fabric import LinkFabric
from shardcompute.collectives.fabrics.socket_fabric import SocketFabric
from shardcompute.core.errors import CollectiveError


def numbers(rank: int, size: int) -> Array:
    return np.random.default_rng([rank, size]).standard_normal(size).astype(np.float32)


def all_operations(group: FabricGroup) -> list[Array]:
    mine = numbers(group.rank, 1001)
    found = [group.all_reduce(mine), group.reduce_scatter(mine.reshape(77, 13)[: 70 + group.size])]
    found += group.all_gather(mine[: group.rank * 5])
    widths = [7 + rank for rank in range(group.size)]
    found += [
        group.gather_columns(mine[: rows * widths[group.rank]].reshape(rows, -1), widths) for rows in (1, 3)
    ]
    found += [group.broadcast(mine.astype(np.float16) if group.rank == 1 else None, 1)]
    if group.rank == 0:
        group.send(mine, 1)
    elif group.rank == 1:
        found.append(group.receive(0))
    group.barrier()
    pair = group.split([0, group.size - 1]) if group.rank in (0, group.size - 1) else None
    return found if pair is None else [*found, pair.all_reduce(mine)]


def as_bytes(found: list[Array]) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(each.dtype.name, each.shape, each.tobytes()) for each in found]


@pytest.mark.parametrize("way", [None, *Algorithm])
def test_what_threads_compute_is_what_links_carry(connect: Any, way: Algorithm | None) -> None:
    expected = run_ranks(thread_groups(4), all_operations)

    found = run_ranks(connect(4, topology=TopologyChoice(way)), all_operations)

    assert [as_bytes(each) for each in found] == [as_bytes(each) for each in expected]


@pytest.mark.parametrize("way", [Algorithm.DIRECT, Algorithm.RING, Algorithm.MESH])
def test_arrays_larger_than_any_buffer_do_not_stop_each_other(connect: Any, way: Algorithm) -> None:
    size = 3_000_001

    found = run_ranks(
        connect(3, topology=TopologyChoice(way)), lambda group: group.all_reduce(numbers(group.rank, size))
    )

    expected = (numbers(0, size) + numbers(1, size)) + numbers(2, size)
    assert all(each.tobytes() == expected.tobytes() for each in found)


def test_links_leave_their_sockets_to_the_ranks(connect: Any, kind: str) -> None:
    group = connect(2)[0]
    assert isinstance(group.world.fabric, LinkFabric if kind == "inproc" else SocketFabric)


def test_what_was_measured_is_the_same_for_all_ranks(connect: Any) -> None:
    groups = connect(3)

    assert len({group.line for group in groups}) == 1
    assert 0 < groups[0].line.latency_s < 5
    assert groups[0].line.bytes_per_s > 1000
    for size in (100, 10_000, 10_000_000):
        assert len({group.algorithm_for(size) for group in groups}) == 1


def test_who_leaves_ends_the_call_of_those_who_wait(connect: Any) -> None:
    groups = connect(3)

    def work(group: FabricGroup) -> str:
        if group.rank == 2:
            group.close()
            return ""
        with pytest.raises(CollectiveError) as caught:
            group.all_reduce(numbers(group.rank, 100))
        with pytest.raises(CollectiveError) as again:
            group.barrier()
        assert again.value.message == caught.value.message
        return caught.value.message

    for message in run_ranks(groups, work)[:2]:
        assert "all_reduce" in message
        assert "rank 2" in message


def test_a_rank_whose_process_is_gone_is_named(connect: Any) -> None:
    groups = connect(2)
    # As when a process dies: no farewell.
    groups[1].world.fabric.close()

    with pytest.raises(CollectiveError, match=r"all_reduce \d+ failed on rank 0 because of rank 1") as caught:
        groups[0].all_reduce(numbers(0, 100))

    assert caught.value.rank == 1
    assert caught.value.operation == "all_reduce"
    assert caught.value.sequence is not None


def test_who_hears_of_a_failure_knows_whose_it_was(connect: Any) -> None:
    groups = connect(3)

    def work(group: FabricGroup) -> int | None:
        if group.rank == 2:
            group.world.fabric.close()
            return 2
        pair = group.split([0, 1])
        # Rank 0 waits for rank 1 alone, which finds that rank 2 is gone.
        with pytest.raises(CollectiveError) as caught:
            pair.barrier() if group.rank == 0 else group.receive(2)
        return caught.value.rank

    assert run_ranks(groups, work) == [2, 2, 2]


def test_closing_wakes_a_rank_that_waits_for_work(connect: Any) -> None:
    groups = connect(2)
    outcome: list[BaseException] = []
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        try:
            groups[1].broadcast(None, timeout_s=3600)
        except CollectiveError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    is_waiting.wait(10)
    groups[1].close()
    thread.join(30)

    assert not thread.is_alive()
    assert "broadcast" in str(outcome[0]) or "it leaves" in str(outcome[0])
