"""A session that begins with another's memory goes on to the same bits as one that computed it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.kv import PageBudget
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CapacityError
from shardcompute.runtime.shard import open_shard
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import open_tiny

LENGTH, COMMON = 90, 70


@pytest.fixture(params=["onnx", "numpy", "torch", "mlx"])
def executor(request: pytest.FixtureRequest, tmp_path: Path) -> Executor:
    if request.param in ("torch", "mlx"):
        pytest.importorskip(request.param)
    save_tiny_llama(tmp_path)
    options = ExecutorOptions(kv_bytes=1 << 22, context_length=256)
    with open_tiny(tmp_path) as checkpoint:
        return open_shard(checkpoint, backend=request.param, options=options)


def compute(executor: Executor, session: int, ids: np.ndarray, start: int) -> np.ndarray:
    rows = executor.step([Segment(session, start, len(ids) - start, 1)], ids[start:])
    return np.array(rows)


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_same_bits(executor: Executor, is_moved: bool, request: pytest.FixtureRequest) -> None:
    # Only the default backend promises equal bits whatever else a step computes.
    slack = 0.0 if "onnx" in request.node.name else 1e-4
    ids = np.arange(LENGTH) % 50 + 3
    other = np.concatenate([ids[:COMMON], np.arange(20) + 60])
    expected = compute(executor, 1, other, 0)
    compute(executor, 2, ids, 0)
    executor.adopt(2, 3, COMMON, is_moved=is_moved)
    assert executor.session_length(3) == COMMON
    assert (2 in executor.sessions()) is not is_moved
    np.testing.assert_allclose(compute(executor, 3, other, COMMON), expected, rtol=0, atol=slack)
    if not is_moved:
        again = compute(executor, 2, ids, LENGTH - 1)
        np.testing.assert_allclose(again, compute(executor, 4, ids, 0), rtol=0, atol=slack)


def test_what_is_not_there_cannot_be_adopted(executor: Executor) -> None:
    compute(executor, 1, np.arange(40) + 3, 0)
    for source, length in ((1, 41), (9, 1), (1, 0)):
        with pytest.raises(CapacityError):
            executor.adopt(source, 2, length)
    assert executor.sessions() == [1]


def test_adopting_needs_room() -> None:
    budget = PageBudget(page_bytes=1, total_pages=3, context_length=1000)
    budget.take(Segment(1, 0, 128, 0))
    with pytest.raises(CapacityError, match="full"):
        budget.adopt(1, 2, 128, is_moved=False)
    budget.adopt(1, 2, 64, is_moved=False)
    budget.adopt(1, 3, 100, is_moved=True)
    assert budget.pages == {2: 1, 3: 2}
