"""A draft head: its file, and that every backend computes what is written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Matrix, rows_of
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
from support.models.draft_heads import draft_by_the_book, random_draft_head
from support.models.tiny_checkpoint import save_tiny_llama

OPTIONS = ExecutorOptions(kv_bytes=1 << 20, max_rows=16, max_logit_rows=16, context_length=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"), layers=1)
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(folder))) as opened:
        yield opened


def assert_equal(one: object, other: object) -> None:
    for field in fields(one):  # type: ignore[arg-type]
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if field.name == "layers":
            for pair in zip(mine, its, strict=True):
                assert_equal(*pair)
        elif isinstance(mine, np.ndarray | int | float):
            np.testing.assert_array_equal(mine, its)
        else:
            # Scales are kept in 16 bit.
            np.testing.assert_allclose(_dense(mine), _dense(its), rtol=1e-3, atol=1e-6)


def _dense(matrix: Matrix) -> np.ndarray:
    return matrix.to_dense()


def test_a_file_gives_back_what_was_saved(checkpoint: Checkpoint) -> None:
    weights = random_draft_head(checkpoint.spec)
    content = encode_draft_head(weights)
    decoded = decode_draft_head(content, checkpoint.spec.hidden, checkpoint.spec.vocab_size)
    assert_equal(weights, decoded)
    assert encode_draft_head(decoded) == content


def told(content: bytes, **changed: object) -> bytes:
    """The file with another header."""
    size = int.from_bytes(content[8:12], "little")
    header = json.dumps({**json.loads(content[12 : 12 + size]), **changed}).encode()
    return content[:8] + len(header).to_bytes(4, "little") + header + content[12 + size :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"x" + content[1:],
        lambda content: content.replace(b"ahead2", b"ahead1", 1),
        lambda content: content[:12] + b"[" + content[13:],
        lambda content: content[:8] + b"\xff\xff\xff\x7f" + content[12:],
        lambda content: content[:40],
        lambda content: content[:8] + (2).to_bytes(4, "little") + b"[]" + content[14:],
        lambda content: told(content, layers=1 << 40),
        lambda content: told(content, width=1 << 60),
        lambda content: told(content, heads=-4),
        lambda content: told(content, heads=True),
        lambda content: told(content, ids=0),
        lambda content: told(content, kv_heads=3),
        lambda content: told(content, layers="2"),
        lambda content: told(content, theta=float("nan")),
        lambda content: told(content, theta=0.5),
        lambda content: told(content, head_dim=10**400),
    ],
)
def test_a_damaged_or_hostile_file_is_refused(
    checkpoint: Checkpoint, damage: Callable[[bytes], bytes]
) -> None:
    content = encode_draft_head(random_draft_head(checkpoint.spec))
    with pytest.raises(CorruptModelError):
        decode_draft_head(damage(content), checkpoint.spec.hidden)


def test_a_file_whose_numbers_are_none_is_refused(checkpoint: Checkpoint) -> None:
    weights = random_draft_head(checkpoint.spec)
    weights.layers[1].mlp_norm[3] = np.nan
    with pytest.raises(CorruptModelError, match="finite"):
        decode_draft_head(encode_draft_head(weights), checkpoint.spec.hidden)


def test_a_file_for_another_model_is_refused(checkpoint: Checkpoint) -> None:
    content = encode_draft_head(random_draft_head(checkpoint.spec))
    with pytest.raises(CorruptModelError, match="draft-head train"):
        decode_draft_head(content, 2 * checkpoint.spec.hidden)
    with pytest.raises(CorruptModelError, match="token"):
        decode_draft_head(content, checkpoint.spec.hidden, checkpoint.spec.vocab_size // 2)


# ONNX Runtime rounds activations to 8 bits where weights have 8.
@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("numpy", 2e-3),
        ("onnx", 0.1),
        ("torch", 2e-3),
        ("mlx", 2e-3),
        pytest.param("torch on cuda", 0.1, marks=pytest.mark.gpu),
    ],
)
def test_backends_compute_what_is_written_down(checkpoint: Checkpoint, backend: str, error: float) -> None:
    """Two sessions, in pieces, with a row that is taken back in between."""
    backend, _, device = backend.partition(" on ")
    if backend in ("torch", "mlx"):
        library = pytest.importorskip(backend)
        if device and not library.cuda.is_available():
            pytest.skip("no CUDA device")
    spec, weights = checkpoint.spec, random_draft_head(checkpoint.spec)
    head = rows_of(checkpoint.source(head_stage(spec)).matrix("head"), weights.ids)
    executor = _run_by(
        backend, DraftHeadNetwork(spec, weights, head), replace(OPTIONS, device=device or "cpu")
    )
    noise = np.random.default_rng(1)
    embedded, states = noise.standard_normal((2, 2, 7, spec.hidden), dtype=np.float32)
    embedded[0, 2] = 0
    rows = np.concatenate([embedded, states], axis=-1)

    def step(*segments: Segment) -> tuple[np.ndarray, np.ndarray]:
        given = [rows[each.session, each.start : each.stop] for each in segments]
        logits = executor.step(list(segments), np.concatenate(given), keeps_hidden=True)
        return np.array(logits), np.array(executor.final_rows())

    step(Segment(0, 0, 3), Segment(1, 0, 5))
    rows[0, 3], kept = -rows[0, 3], rows[0, 3].copy()
    step(Segment(0, 3, 1, 1))
    rows[0, 3] = kept
    logits, final = step(Segment(0, 3, 4, 2), Segment(1, 5, 2, 1))
    executor.close()
    wanted = [draft_by_the_book(weights, _dense(head), states[i], embedded[i], spec.norm_eps) for i in (0, 1)]
    assert logits.shape == (3, len(weights.ids))
    expected = np.concatenate([wanted[0][1][5:], wanted[1][1][6:]])
    np.testing.assert_allclose(final, np.concatenate([wanted[0][0][3:], wanted[1][0][5:]]), atol=error * 4)
    np.testing.assert_allclose(logits, expected, atol=error * np.abs(expected).max())


def test_what_it_keeps_of_a_token_is_told_by_its_own_heads(checkpoint: Checkpoint) -> None:
    weights: DraftHeadWeights = random_draft_head(checkpoint.spec, heads=8, kv_heads=1, head_dim=8)
    assert (weights.kv_shape.heads, weights.kv_shape.entries) == (1, 8)
