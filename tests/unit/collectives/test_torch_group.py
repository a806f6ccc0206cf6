"""The same sums through torch.distributed: gloo with ranks as threads, NCCL where there are GPUs for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from shardcompute.collectives import run_ranks, thread_groups
from shardcompute.collectives.elements import CODES, to_bfloat16
from shardcompute.core.errors import BackendError, CollectiveError, UsageError

torch = pytest.importorskip("torch", reason="torch is not installed")
from shardcompute.collectives.torch_group import TorchGroup, TorchMeeting, connect_torch  # noqa: E402


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run_torch(
    size: int, work: Callable[[TorchGroup], Any], devices: Sequence[str] = (), **options: Any
) -> list[Any]:
    """`work` of every rank in a thread of its own, on its device."""
    port = free_port()
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            device = devices[rank] if devices else "cpu"
            group = connect_torch(TorchMeeting(rank, size, port, device=device, timeout_s=10.0, **options))
            found[rank] = work(group)
            group.barrier()
            group.close()
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for outcome in found.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return [found[rank] for rank in range(size)]


def example(rank: int, size: int, dtype: Any) -> np.ndarray:
    rng = np.random.default_rng([rank, size])
    numbers = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)
    if dtype == np.uint16:
        return to_bfloat16(numbers.astype(np.float32))
    return rng.integers(0, 100, size).astype(dtype) if dtype.kind in "iu" else numbers.astype(dtype)


def operations(group: Any) -> list[np.ndarray]:
    found = [group.all_reduce(example(group.rank, size, dtype)) for dtype in CODES for size in (1, 7, 1003)]
    found.append(group.all_reduce(example(group.rank, 100_003, np.dtype("float32")).reshape(1, -1)))
    found.append(group.reduce_scatter(example(group.rank, 33, np.dtype("float32")).reshape(11, 3)))
    found += group.all_gather(example(group.rank, 4 * group.rank, np.dtype("float16")).reshape(group.rank, 4))
    widths = [4 * rank + 1 for rank in range(group.size)]
    columns = example(group.rank, 2 * widths[group.rank], np.dtype("float32")).reshape(2, -1)
    found.append(group.gather_columns(columns, widths))
    found.append(group.broadcast(np.arange(6.0).reshape(2, 3) if group.rank == 1 else None, 1))
    if group.rank == 0:
        group.send(np.arange(5, dtype=np.int8), 1)
    if group.rank == 1:
        found.append(group.receive(0))
    if group.rank in (0, group.size - 1):
        found.append(group.split([0, group.size - 1]).all_reduce(example(group.rank, 9, np.dtype("float32"))))
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_gloo_gives_the_bits_of_our_own_fabrics(size: int) -> None:
    expected = run_ranks(thread_groups(size), operations)

    for ours, theirs in zip(expected, run_torch(size, operations), strict=True):
        assert [(a.dtype, a.shape, a.tobytes()) for a in ours] == [
            (a.dtype, a.shape, a.tobytes()) for a in theirs
        ]


def test_tensors_are_added_where_they_are() -> None:
    def work(group: TorchGroup) -> Any:
        given = torch.full((3, 4), float(group.rank + 1), dtype=torch.bfloat16)
        return group.all_reduce_tensor(given)

    for found in run_torch(3, work):
        assert found.dtype == torch.bfloat16
        assert found.tolist() == [[6.0] * 4] * 3


def test_large_arrays_are_added_by_pieces() -> None:
    def work(group: TorchGroup) -> int:
        group.all_reduce(np.ones(4 * 64 * 1024, np.float32))
        return group.stats.bytes_sent

    assert run_torch(4, work) == [2 * 3 * 1024 * 256] * 4


def test_a_rank_that_is_gone_is_an_error_and_no_wait_without_end() -> None:
    def work(group: TorchGroup) -> str:
        if group.rank == 1:
            group.close()
            raise UsageError("gone")
        with pytest.raises(CollectiveError, match=r"all_reduce 1 failed on rank 0") as caught:
            group.all_reduce(np.ones(3, np.float32))
        with pytest.raises(CollectiveError):
            group.all_reduce(np.ones(3, np.float32))
        return caught.value.operation

    with pytest.raises((UsageError, CollectiveError)):
        run_torch(2, work)


def test_ranks_that_do_not_come_are_missed_in_time() -> None:
    with pytest.raises(CollectiveError, match="did not meet"):
        connect_torch(TorchMeeting(1, 2, free_port(), timeout_s=1.0))


def test_nccl_is_refused_with_its_reason_where_ranks_outnumber_gpus() -> None:
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(BackendError, match="a GPU of its own"):
        connect_torch(TorchMeeting(0, max(ranks, 2), free_port(), backend="nccl", device="cuda:0"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no GPU here")
def test_two_ranks_share_a_gpu_through_gloo() -> None:
    expected = run_ranks(thread_groups(2), operations)

    for ours, theirs in zip(expected, run_torch(2, operations, ["cuda:0"] * 2), strict=True):
        assert [a.tobytes() for a in ours] == [a.tobytes() for a in theirs]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no GPU here")
def test_tensors_of_a_shared_gpu_are_added_on_it() -> None:
    def work(group: TorchGroup) -> Any:
        return group.all_reduce_tensor(torch.full((3, 4), float(group.rank + 1), device="cuda:0"))

    for found in run_torch(2, work, ["cuda:0"] * 2):
        assert found.device.type == "cuda"
        assert found.tolist() == [[3.0] * 4] * 3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
def test_nccl_gives_the_bits_of_our_own_fabrics() -> None:
    expected = run_ranks(thread_groups(2), operations)

    found = run_torch(2, operations, ["cuda:0", "cuda:1"], backend="nccl")
    for ours, theirs in zip(expected, found, strict=True):
        assert [a.tobytes() for a in ours] == [a.tobytes() for a in theirs]
