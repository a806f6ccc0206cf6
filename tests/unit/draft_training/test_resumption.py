"""What a training run leaves is read again as it was, and nothing in it is ever executed."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shardcompute.draft_training.draft_net import NetShape, new_net  # noqa: E402
from shardcompute.draft_training.resumption import read_resumption, write_resumption  # noqa: E402

CPU = torch.device("cpu")
SHAPE = NetShape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, width=16, theta=1e4, eps=1e-5)
IDS = np.array([3, 5, 8], dtype=np.int32)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    net = new_net(SHAPE, torch.ones(SHAPE.hidden), torch.Generator().manual_seed(1))
    write_resumption(tmp_path / "run" / "left", SHAPE, net.weights, IDS)
    return tmp_path / "run" / "left"


def test_weights_and_tokens_are_read_as_they_were_written(left: Path) -> None:
    found = read_resumption(left, SHAPE, CPU)
    assert found is not None
    net, ids = found
    expected = new_net(SHAPE, torch.ones(SHAPE.hidden), torch.Generator().manual_seed(1))
    assert net.weights.keys() == expected.weights.keys()
    assert all(torch.equal(net.weights[name], expected.weights[name]) for name in expected.weights)
    assert all(each.requires_grad for each in net.weights.values())
    assert np.array_equal(ids, IDS)
    assert [file.name for file in left.parent.iterdir()] == ["left"], "nothing half written stays behind"


def test_another_shape_is_begun_anew(left: Path) -> None:
    assert read_resumption(left, dataclasses.replace(SHAPE, layers=2), CPU) is None
    assert read_resumption(left.with_name("none"), SHAPE, CPU) is None


def test_a_torn_file_and_one_that_would_run_code_are_begun_anew(left: Path) -> None:
    left.write_bytes(left.read_bytes()[:-40])
    assert read_resumption(left, SHAPE, CPU) is None
    left.write_bytes(pickle.dumps({"shape": "x"}))
    assert read_resumption(left, SHAPE, CPU) is None
