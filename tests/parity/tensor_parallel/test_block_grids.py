"""Families on ranks of a block grid, each with a quadrant of every matrix: the logits of one process, within the bound
of sums in another order, and the same bits for a row alone, in company and in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.models.spec import whole
from shardcompute.models.tensor_share import GridShape
from shardcompute.runtime.shard import open_shard, split_checkpoint
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import FAMILIES, VOCABULARY, save_tiny
from support.ranks import RankedStage

IDS = np.random.default_rng(7).integers(3, VOCABULARY, 24)
OPTIONS = ExecutorOptions(kv_bytes=1 << 24, max_rows=64, context_length=64)
BOUND = 3e-5
ROUNDED_BOUND = 0.5
GRIDS: tuple[GridShape, ...] = ((2, 2), (1, 2), (2, 3))
SAMPLE = ("llama-biases", "llama-mqa", "gemma2-capped", "olmo2", "mixtral", "qwen2-moe", "gpt-oss")


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Checkpoint]:
    path = save_tiny(request.param, tmp_path / "tiny")
    with open_checkpoint(resolve(parse_reference(str(path)), Settings(data_dir=tmp_path))) as opened:
        yield opened


def _alone(checkpoint: Checkpoint, backend: str = "onnx", form: str = "native") -> Float32:
    with closing(open_shard(checkpoint, backend=backend, form=form, options=OPTIONS)) as executor:
        return np.array(executor.step([Segment(1, 0, len(IDS), len(IDS))], IDS))


def _grid(
    checkpoint: Checkpoint, grid: GridShape, *, backend: str = "onnx", form: str = "native"
) -> RankedStage:
    # Ranks of different speed: lines of a grid take the sum of theirs.
    weights = [1.0 + (rank % 2) for rank in range(grid[0] * grid[1])]
    split = split_checkpoint(checkpoint, weights, form=form, grid=grid)
    return RankedStage(checkpoint, whole(checkpoint.spec), split, backend=backend, options=OPTIONS, form=form)


def _logits(ranks: RankedStage) -> Float32:
    return ranks.step([Segment(1, 0, len(IDS), len(IDS))], IDS)


def _in_pieces(ranks: RankedStage) -> Float32:
    together = ranks.step([Segment(2, 0, 9, 9), Segment(3, 0, 5, 0)], np.concatenate([IDS[:9], IDS[:5]]))
    rest = ranks.step([Segment(2, 9, len(IDS) - 10, len(IDS) - 10)], IDS[9:-1])
    return np.concatenate([together, rest, ranks.step([Segment(2, len(IDS) - 1, 1, 1)], IDS[-1:])])


def _check(checkpoint: Checkpoint, grid: GridShape) -> None:
    expected, spec = _alone(checkpoint), checkpoint.spec
    sparse = sum(layer.is_sparse for layer in spec.layers)
    blocks = 2 * spec.layer_count - sparse
    with _grid(checkpoint, grid) as stage:
        logits = _logits(stage)
        np.testing.assert_allclose(logits, expected, atol=BOUND)
        # Along rows behind each block's first matrix, along columns behind its last, whose parts rows gather.
        assert stage.line_calls("all_reduce") == (blocks, blocks)
        assert stage.line_calls("all_gather") == (blocks, 0)
        # All ranks meet for the embedding and for sparse blocks, which are cut over all of them.
        assert stage.calls("all_reduce") == 1 + sparse
        np.testing.assert_array_equal(_in_pieces(stage), logits)


@pytest.mark.parametrize("checkpoint", SAMPLE, indirect=True)
def test_quadrants_give_the_logits_of_one(checkpoint: Checkpoint) -> None:
    _check(checkpoint, (2, 2))


@pytest.mark.long
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
def test_every_family_and_grid(checkpoint: Checkpoint, grid: GridShape) -> None:
    if checkpoint.spec.latent is None:
        _check(checkpoint, grid)
    else:
        with pytest.raises(UnsupportedModelError, match="latent attention"):
            _grid(checkpoint, grid)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("checkpoint", ["llama-biases", "mixtral"], indirect=True)
def test_other_backends(checkpoint: Checkpoint, backend: str) -> None:
    expected = _alone(checkpoint, backend)
    for grid in GRIDS:
        with _grid(checkpoint, grid, backend=backend) as stage:
            np.testing.assert_allclose(_logits(stage), expected, atol=BOUND)


@pytest.mark.parametrize("form", ["int8", "int4", "mixed"])
@pytest.mark.parametrize("checkpoint", ["llama-biases"], indirect=True)
def test_quantised_weights_are_cut_not_rounded_again(checkpoint: Checkpoint, form: str) -> None:
    """The oracle rounds no activations, so it sees any weight that is another one."""
    with _grid(checkpoint, (2, 2), backend="numpy", form=form) as stage:
        np.testing.assert_allclose(_logits(stage), _alone(checkpoint, "numpy", form), atol=BOUND)
    with _grid(checkpoint, (2, 2), form=form) as stage:
        logits = _logits(stage)
        np.testing.assert_allclose(logits, _alone(checkpoint, "onnx", form), atol=ROUNDED_BOUND)
        np.testing.assert_array_equal(_in_pieces(stage), logits)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_quadrant_holds_as_much_as_a_rank_in_a_line(checkpoint: Checkpoint) -> None:
    """Of weights; but keys and values of a row are kept by all of its ranks."""
    line = split_checkpoint(checkpoint, [1.0] * 4)
    grid = split_checkpoint(checkpoint, [1.0] * 4, grid=(2, 2))
    for own, theirs in zip(grid.shares, line.shares, strict=True):
        assert own.inputs is not None
        inner, inputs = own.columns[1] - own.columns[0], own.inputs[1] - own.inputs[0]
        assert inner * inputs == (theirs.columns[1] - theirs.columns[0]) * checkpoint.spec.hidden
        assert own.kv_heads[1] - own.kv_heads[0] == checkpoint.spec.kv_heads // 2


@pytest.mark.parametrize("checkpoint", ["deepseek-v3"], indirect=True)
def test_what_no_grid_can_be_cut_for_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        split_checkpoint(checkpoint, [1.0] * 4, grid=(2, 2))
    with pytest.raises(UsageError, match="2 × 3 is not for 4 ranks"):
        split_checkpoint(checkpoint, [1.0] * 4, grid=(2, 3))
    with pytest.raises(UsageError, match="sum what they make"):
        split_checkpoint(checkpoint, [1.0] * 4, exchange="gather", grid=(2, 2))
