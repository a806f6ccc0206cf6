"""A draft head: its file, and that every backend computes what is written down."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32, rows_of
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CorruptModelError
from shardcompute.core.settings import Settings
from shardcompute.models.draft_head import (
    DraftHeadNetwork,
    DraftHeadWeights,
    decode_draft_head,
    encode_draft_head,
)
from shardcompute.models.spec import head_stage
from shardcompute.runtime.shard import _run_by
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.draft_heads import random_draft_head
from support.models.tiny_checkpoint import save_tiny_llama

OPTIONS = ExecutorOptions(kv_bytes=1 << 20, max_rows=16, max_logit_rows=16, context_length=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"), layers=1)
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(folder))) as opened:
        yield opened


def assert_equal(one: DraftHeadWeights, other: DraftHeadWeights) -> None:
    assert np.array_equal(one.ids, other.ids)
    assert np.array_equal(one.norm, other.norm)
    pairs = [(one.join, other.join)]
    for mine, its in zip(one.blocks, other.blocks, strict=True):
        assert np.array_equal(mine.norm, its.norm)
        pairs += [(mine.gate_up, its.gate_up), (mine.down, its.down)]
    for mine_matrix, its_matrix in pairs:
        # Scales are kept in 16 bit.
        np.testing.assert_allclose(mine_matrix.to_dense(), its_matrix.to_dense(), rtol=1e-3, atol=1e-6)


def test_a_file_gives_back_what_was_saved(checkpoint: Checkpoint) -> None:
    weights = random_draft_head(checkpoint.spec)
    content = encode_draft_head(weights)
    decoded = decode_draft_head(content, checkpoint.spec.hidden)
    assert_equal(weights, decoded)
    assert encode_draft_head(decoded) == content


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"x" + content[1:],
        lambda content: content[:12] + b"[" + content[13:],
        lambda content: content[:40],
    ],
)
def test_a_damaged_file_is_refused(checkpoint: Checkpoint, damage: object) -> None:
    content = encode_draft_head(random_draft_head(checkpoint.spec))
    with pytest.raises(CorruptModelError):
        decode_draft_head(damage(content), checkpoint.spec.hidden)  # type: ignore[operator]


def test_a_file_for_a_model_of_another_width_is_refused(checkpoint: Checkpoint) -> None:
    content = encode_draft_head(random_draft_head(checkpoint.spec))
    with pytest.raises(CorruptModelError, match="draft-head train"):
        decode_draft_head(content, 2 * checkpoint.spec.hidden)


def by_the_book(
    rows: Float32, weights: DraftHeadWeights, head: Float32, eps: float
) -> tuple[Float32, Float32]:
    def normed(x: Float32) -> Float32:
        out: Float32 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
        return out

    halves = np.split(rows, 2, axis=1)
    u = np.concatenate([normed(half) for half in halves], axis=1) @ weights.join.to_dense().T
    for block in weights.blocks:
        gate, up = np.split((normed(u) * block.norm) @ block.gate_up.to_dense().T, 2, axis=1)
        u = u + (gate / (1 + np.exp(-gate)) * up) @ block.down.to_dense().T
    state = normed(u) * weights.norm
    return state, state @ head.T


# ONNX Runtime rounds activations to 8 bits where weights have 8.
@pytest.mark.parametrize(
    ("backend", "error"), [("numpy", 1e-4), ("onnx", 0.1), ("torch", 1e-3), ("mlx", 1e-3)]
)
def test_backends_compute_what_is_written_down(checkpoint: Checkpoint, backend: str, error: float) -> None:
    if backend in ("torch", "mlx"):
        pytest.importorskip(backend)
    spec, weights = checkpoint.spec, random_draft_head(checkpoint.spec)
    head = rows_of(checkpoint.source(head_stage(spec)).matrix("head"), weights.ids)
    executor = _run_by(backend, DraftHeadNetwork(spec, weights, head), OPTIONS)
    rows = np.random.default_rng(1).standard_normal((3, 2 * spec.hidden), dtype=np.float32)
    logits = np.array(executor.step([Segment(i, 0, 1, 1) for i in range(3)], rows, keeps_hidden=True))
    states = np.array(executor.hidden_rows())
    executor.close()
    expected_states, expected = by_the_book(rows, weights, head.to_dense(), spec.norm_eps)
    assert logits.shape == (3, len(weights.ids))
    np.testing.assert_allclose(states, expected_states, atol=error)
    np.testing.assert_allclose(logits, expected, atol=error * np.abs(expected).max())
