"""Ranks of the torch backend that meet through torch.distributed: gloo between CPUs and on one shared GPU, NCCL with a
GPU each. Sums are ours, so all agree to the bit with ranks that meet over our own fabrics."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.collectives import FabricGroup, run_ranks, thread_groups
from shardcompute.core.batch import Segment
from shardcompute.core.settings import Settings
from shardcompute.models.tensor_share import TensorSplit
from shardcompute.runtime.shard import open_shard, split_checkpoint
from shardcompute.runtime.tensor_stage import join_ranks
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import VOCABULARY, save_tiny

torch = pytest.importorskip("torch", reason="torch is not installed")
from shardcompute.collectives.torch_group import TorchGroup, TorchMeeting, connect_torch  # noqa: E402

IDS = np.random.default_rng(7).integers(3, VOCABULARY, 12)
GPUS = torch.cuda.device_count()
NEEDS_ONE = pytest.mark.skipif(GPUS < 1, reason="there is no CUDA device here")
NEEDS_TWO = pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU for each rank, and there are {GPUS}")


def _options(device: str) -> ExecutorOptions:
    return ExecutorOptions(kv_bytes=1 << 24, max_rows=64, context_length=64, device=device)


def _logits(
    checkpoint: Checkpoint, split: TensorSplit, group: FabricGroup | TorchGroup, device: str
) -> Float32:
    rank = join_ranks(checkpoint.spec, split, group)
    executor = open_shard(checkpoint, backend="torch", options=_options(device), rank=rank)
    prompt = np.array(executor.step([Segment(1, 0, len(IDS) - 1, 1)], IDS[:-1]))
    return np.concatenate([prompt, executor.step([Segment(1, len(IDS) - 1, 1, 1)], IDS[-1:])])


@pytest.mark.parametrize(
    ("backend", "devices"),
    [
        ("gloo", ("cpu", "cpu")),
        pytest.param("gloo", ("cuda:0", "cuda:0"), marks=[pytest.mark.gpu, NEEDS_ONE]),
        pytest.param("nccl", ("cuda:0", "cuda:1"), marks=[pytest.mark.gpu, NEEDS_TWO]),
    ],
)
@pytest.mark.parametrize("exchange", ["reduce", "gather"])
def test_ranks_that_meet_through_torch(
    exchange: str, backend: str, devices: tuple[str, str], tmp_path: Path
) -> None:
    path = save_tiny("llama-biases", tmp_path / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with open_checkpoint(resolve(parse_reference(str(path)), Settings(data_dir=tmp_path))) as checkpoint:
        split = split_checkpoint(checkpoint, [1.0, 2.0], exchange=exchange)

        def meet(rank: int) -> Float32:
            meeting = TorchMeeting(rank, 2, port, backend=backend, device=devices[rank], timeout_s=60.0)
            group = connect_torch(meeting)
            found = _logits(checkpoint, split, group, devices[rank])
            group.barrier()
            group.close()
            return found

        expected = run_ranks(
            thread_groups(2), lambda group: _logits(checkpoint, split, group, devices[group.rank])
        )
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(meet, range(2)))
    for ours, theirs in zip(expected, found, strict=True):
        np.testing.assert_array_equal(theirs, ours)
