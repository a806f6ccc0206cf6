"""llama.cpp as a backend: stages equal to the whole model, rows equal whatever company they are computed in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.exactness import chain_tolerance, class_of
from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.llamacpp.executor import LlamaCppExecutor
from shardcompute.backends.llamacpp.library import installed_version
from shardcompute.backends.llamacpp.routers import RouterRows
from shardcompute.backends.llamacpp.stage_context import StageContext
from shardcompute.backends.matrix import Array
from shardcompute.bench.engine.random_gguf import LlamaShape, write_random_gguf
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CapacityError, RowGapError, UnsupportedModelError, UsageError
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import save_tiny
from support.models.tiny_gguf import tiny_gguf, write_gguf

pytestmark = pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")

SHAPE = LlamaShape(4, 128, 256, 4, 2, 320)
TYPES = ("Q4_0", "Q4_1", "Q8_0", "F16", "F32")
SPARSE = LlamaShape(4, 128, 64, 4, 2, 320, architecture="qwen3moe", head_size=32, experts=8, per_token=2)
MODELS = {
    **{dtype: (SHAPE, dtype) for dtype in TYPES},
    **{f"experts-{dtype}": (SPARSE, dtype) for dtype in ("Q4_0", "Q8_0")},
    "mixtral-Q8_0": (LlamaShape(4, 128, 64, 4, 2, 320, experts=4, per_token=2), "Q8_0"),
}
TOKENS = np.random.default_rng(5).integers(0, SHAPE.vocab_size, 700)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_random_gguf(path, *MODELS[request.param])
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as opened:
        yield opened


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDCOMPUTE_HOME", str(tmp_path))
    return tmp_path


def open_stage(
    checkpoint: Checkpoint,
    start: int = 0,
    stop: int = 4,
    *,
    threads: int = 1,
    tokens: int = 16_384,
    context: int = 900,
) -> Executor:
    stage = Stage(start, stop, 4)
    token_bytes = stage.count * 2 * 2 * 32 * 2
    options = ExecutorOptions(kv_bytes=tokens * token_bytes, context_length=context, threads=threads)
    return open_shard(checkpoint, stage=stage, backend="llamacpp", options=options)


def run(executors: Sequence[Executor], segments: Sequence[Segment], ids: Array) -> Array:
    x = ids
    for executor in executors:
        x = executor.step(segments, x)
    return x.copy()


def one_by_one(executors: Sequence[Executor], session: int, ids: Array, start: int = 0) -> Array:
    return np.concatenate(
        [run(executors, [Segment(session, start + i, 1, 1)], ids[i : i + 1]) for i in range(len(ids))]
    )


def is_near(got: Array, wanted: Array, checkpoint: Checkpoint) -> bool:
    """Where there are experts, less so: activations that are rounded otherwise choose others for some rows."""
    apart = np.abs(got - wanted).max(axis=-1) / np.abs(wanted).max()
    return bool(apart.max() < 0.05 if checkpoint.spec.experts is None else np.median(apart) < 0.1)


def test_two_halves_equal_the_whole(checkpoint: Checkpoint) -> None:
    ids = TOKENS[:70]
    whole = run([open_stage(checkpoint)], [Segment(1, 0, 70, 64)], ids)
    halves = [open_stage(checkpoint, 0, 2), open_stage(checkpoint, 2, 4)]
    assert np.array_equal(run(halves, [Segment(1, 0, 70, 64)], ids), whole)
    thirds = [open_stage(checkpoint, 0, 1), open_stage(checkpoint, 1, 3), open_stage(checkpoint, 3, 4)]
    assert np.array_equal(run(thirds, [Segment(1, 0, 70, 64)], ids), whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_at_once_equal_one_by_one(checkpoint: Checkpoint, threads: int) -> None:
    """Also beyond the 256 and 512 tokens at which llama.cpp could change the order of its sums."""
    executor = open_stage(checkpoint, threads=threads)
    for start in range(0, 512, 64):
        run([executor], [Segment(1, start, 64, 0)], TOKENS[start : start + 64])
    ids = TOKENS[512:600]
    wanted = one_by_one([executor], 1, ids, 512)
    for count in (2, 3, 5, 17, 64):
        got = [
            run(
                [executor],
                [Segment(1, 512 + i, min(count, 64 - i), min(count, 64 - i))],
                ids[i : min(i + count, 64)],
            )
            for i in range(0, 64, count)
        ]
        assert np.array_equal(np.concatenate(got), wanted[:64]), count
    executor.close()


def test_rows_in_a_batch_equal_rows_alone(checkpoint: Checkpoint) -> None:
    executor = open_stage(checkpoint)
    texts = {session: TOKENS[session * 50 : session * 50 + 40] for session in range(5)}
    alone = {}
    for session, ids in texts.items():
        alone[session] = one_by_one([executor], 99, ids)
        executor.close_session(99)
    for session, ids in texts.items():
        if session != 2:
            run([executor], [Segment(session, 0, 10, 0)], ids[:10])
    # One decodes, one verifies five rows, one begins, one goes on from further back.
    segments = [
        Segment(0, 10, 1, 1),
        Segment(1, 10, 5, 5),
        Segment(2, 0, 20, 1),
        Segment(3, 7, 2, 2),
        Segment(4, 10, 1, 1),
    ]
    ids = np.concatenate([texts[s.session][s.start : s.stop] for s in segments])
    got = run([executor], segments, ids)
    wanted = np.concatenate([alone[s.session][s.stop - s.logit_rows : s.stop] for s in segments])
    assert np.array_equal(got, wanted)
    executor.close()


def test_sessions_beyond_the_streams_keep_their_bits(checkpoint: Checkpoint) -> None:
    executor = open_stage(checkpoint, tokens=4096, context=500)  # four streams of 512
    texts = {session: TOKENS[session * 30 : session * 30 + 30] for session in range(9)}
    alone = one_by_one([executor], 99, texts[3])
    executor.close_session(99)
    segments = [Segment(session, 0, 20, 0) for session in texts]
    run([executor], segments, np.concatenate([ids[:20] for ids in texts.values()]))
    for position in range(20, 30):
        segments = [Segment(session, position, 1, 1) for session in texts]
        got = run([executor], segments, np.array([ids[position] for ids in texts.values()]))
        assert np.array_equal(got[3], alone[position])
    assert executor.kv_usage().sessions == 9
    executor.close()


def test_adopted_sessions_go_on_from_the_same_bits(checkpoint: Checkpoint) -> None:
    executor = open_stage(checkpoint)
    wanted = one_by_one([executor], 1, TOKENS[:40])
    executor.adopt(1, 2, 30)
    assert (executor.session_length(1), executor.session_length(2)) == (40, 30)
    assert np.array_equal(run([executor], [Segment(2, 30, 10, 10)], TOKENS[30:40]), wanted[30:])
    executor.adopt(1, 3, 25, is_moved=True)
    assert executor.session_length(1) == 0
    assert np.array_equal(run([executor], [Segment(3, 25, 15, 15)], TOKENS[25:40]), wanted[25:])
    with pytest.raises(CapacityError):
        executor.adopt(2, 4, 41)
    executor.close()


def test_what_cannot_be_is_refused_before_anything_changes(checkpoint: Checkpoint) -> None:
    executor = open_stage(checkpoint, tokens=1024, context=500)
    run([executor], [Segment(1, 0, 64, 1)], TOKENS[:64])
    used = executor.kv_usage()
    with pytest.raises(RowGapError):
        executor.step([Segment(1, 65, 1, 1)], TOKENS[:1])
    with pytest.raises(CapacityError):
        executor.step([Segment(1, 64, 1, 1), Segment(2, 0, 460, 1)], TOKENS[:461])
    with pytest.raises(UsageError, match="past the context"):
        executor.step([Segment(1, 64, 500, 1)], TOKENS[:500])
    with pytest.raises(UsageError, match="vocabulary"):
        executor.step([Segment(1, 64, 1, 1)], np.array([SHAPE.vocab_size]))
    assert executor.kv_usage() == used
    assert executor.session_length(1) == 64
    executor.close()


def test_hidden_states_are_kept_where_they_are_wanted(checkpoint: Checkpoint) -> None:
    """Those that logits are made of: the same bits in any company, beside logits that do not change for it."""
    executor = open_stage(checkpoint)
    logits = one_by_one([executor], 1, TOKENS[:20])
    with pytest.raises(UsageError, match="kept no hidden states"):
        executor.hidden_rows()
    alone = []
    for position in range(20):
        executor.step([Segment(2, position, 1, 1)], TOKENS[position : position + 1], keeps_hidden=True)
        alone.append(executor.hidden_rows().copy())
    segments = [Segment(3, 0, 20, 4), Segment(4, 0, 9, 1)]
    got = executor.step(segments, np.concatenate([TOKENS[:20], TOKENS[:9]]), keeps_hidden=True)
    assert np.array_equal(got, np.concatenate([logits[16:20], logits[8:9]]))
    wanted = np.concatenate([*alone[16:20], alone[8]])
    assert np.array_equal(executor.hidden_rows(), wanted)
    ours = open_shard(
        checkpoint, backend="numpy", options=ExecutorOptions(kv_bytes=1 << 24, context_length=900)
    )
    ours.step(segments, np.concatenate([TOKENS[:20], TOKENS[:9]]), keeps_hidden=True)
    assert is_near(wanted, ours.hidden_rows(), checkpoint)
    assert np.array_equal(run([executor], [Segment(5, 0, 20, 20)], TOKENS[:20]), logits)
    with pytest.raises(UsageError, match="last slice"):
        open_stage(checkpoint, 0, 2).step([Segment(1, 0, 1, 0)], TOKENS[:1], keeps_hidden=True)
    executor.close()


def test_agrees_with_our_own_kernels(checkpoint: Checkpoint) -> None:
    """Another implementation of the same model: near, not equal."""
    theirs = open_stage(checkpoint)
    ours = open_shard(
        checkpoint, backend="numpy", options=ExecutorOptions(kv_bytes=1 << 24, context_length=900)
    )
    segments = [Segment(1, 0, 40, 40)]
    got, wanted = run([theirs], segments, TOKENS[:40]), run([ours], segments, TOKENS[:40])
    assert is_near(got, wanted, checkpoint)
    assert np.mean(got.argmax(-1) == wanted.argmax(-1)) > (0.9 if checkpoint.spec.experts is None else 0.5)


def test_stage_files_do_not_stay(checkpoint: Checkpoint, home: Path) -> None:
    executor = open_stage(checkpoint, 1, 3)
    assert not list((home / "stages").iterdir())
    executor.step([Segment(1, 0, 2, 0)], np.zeros((2, SHAPE.hidden), np.float32))
    executor.close()


def test_models_that_only_llamacpp_knows_are_cut_too(tmp_path: Path) -> None:
    """An architecture without a family of ours."""
    path = write_random_gguf(tmp_path / "model.gguf", SHAPE, "Q8_0", architecture="internlm2")
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as opened:
        with pytest.raises(UnsupportedModelError):
            open_shard(opened, backend="onnx", options=ExecutorOptions(kv_bytes=1 << 24, context_length=900))
        check_that_halves_are_the_whole(opened)


def test_blocks_of_sixteen_levels_are_cut_too(tmp_path: Path) -> None:
    path = write_random_gguf(tmp_path / "model.gguf", SHAPE, "IQ4_NL")
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as opened:
        check_that_halves_are_the_whole(opened)


def check_that_halves_are_the_whole(opened: Checkpoint) -> None:
    whole = run([open_stage(opened)], [Segment(1, 0, 40, 40)], TOKENS[:40])
    halves = [open_stage(opened, 0, 2), open_stage(opened, 2, 4)]
    assert np.array_equal(run(halves, [Segment(1, 0, 40, 40)], TOKENS[:40]), whole)
    assert np.isfinite(whole).all()


def test_latent_attention_is_refused_for_what_it_is(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("deepseek-v3", save_tiny("deepseek-v3", tmp_path))
    path = write_gguf(tmp_path / "model.gguf", metadata | {"tokenizer.ggml.model": "no_vocab"}, tensors)
    with (
        open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as opened,
        pytest.raises(UnsupportedModelError, match="keys and values of this model in one type"),
    ):
        open_shard(opened, backend="llamacpp", options=ExecutorOptions(kv_bytes=1 << 24, context_length=128))


def test_layers_that_depend_on_their_number_are_not_cut(tmp_path: Path) -> None:
    path = write_random_gguf(tmp_path / "model.gguf", SHAPE, "Q8_0", architecture="smollm3")
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as opened:
        assert run([open_stage(opened)], [Segment(1, 0, 9, 9)], TOKENS[:9]).shape == (9, SHAPE.vocab_size)
        with pytest.raises(UnsupportedModelError, match="smollm3"):
            open_stage(opened, 0, 2)


@pytest.mark.parametrize("order", [("onnx", "llamacpp"), ("llamacpp", "onnx")])
def test_a_chain_of_two_backends_keeps_to_the_declared_tolerance(
    checkpoint: Checkpoint, order: tuple[str, str]
) -> None:
    options = ExecutorOptions(kv_bytes=1 << 24, context_length=900)
    segments = [Segment(1, 0, 60, 60)]

    def logits(*backends: str) -> Array:
        cuts = [0, 2, 4] if len(backends) == 2 else [0, 4]
        stages = [
            open_shard(checkpoint, stage=Stage(start, stop, 4), backend=backend, options=options)
            for backend, (start, stop) in zip(backends, itertools.pairwise(cuts), strict=True)
        ]
        rows = run(stages, segments, TOKENS[:60])
        return rows - rows.mean(axis=-1, keepdims=True)

    names = [class_of(backend, "cpu", release="1", kernels="x").name for backend in order]
    mixed = logits(*order)
    for backend in order:
        alone = logits(backend)
        apart = np.linalg.norm(mixed - alone, axis=-1) / np.linalg.norm(alone, axis=-1)
        # A rounding may choose another expert for a row: what is declared holds for most.
        most = apart.max() if checkpoint.spec.experts is None else np.median(apart)
        assert most < chain_tolerance(names, "native")
        assert apart.max() > 0


def test_a_row_of_a_sparse_model_may_be_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because routers' logits are replaced; the probe sees what they would be without that, also behind a head."""
    floats = write_random_gguf(tmp_path / "floats.gguf", SHAPE, "F32")
    with open_checkpoint(resolve(parse_reference(str(floats)), load_settings())) as opened:
        # What this machine's float32 kernels need.
        dense_rows = open_stage(opened).least_rows  # type: ignore[attr-defined]
    path = write_random_gguf(tmp_path / "model.gguf", SPARSE, "Q8_0")
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as opened:
        for stop in (2, 4):
            executor = open_stage(opened, 0, stop)
            assert isinstance(executor, LlamaCppExecutor)
            assert executor.least_rows == 1
            executor.close()
        monkeypatch.setattr(RouterRows, "replace", lambda self, tensor, record_bytes: None)
        for stop in (2, 4):
            executor = open_stage(opened, 0, stop)
            assert isinstance(executor, LlamaCppExecutor)
            assert executor.least_rows == dense_rows
            executor.close()


def test_a_row_alone_of_a_sparse_model_is_computed_without_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callback is on for several rows alone, whatever came before, and on where a stage gives hidden states."""
    asked = []
    on_tensor = StageContext._on_tensor

    def count(self: StageContext, tensor: int, is_asked: bool, data: Any) -> bool:
        asked.append(tensor)
        return on_tensor(self, tensor, is_asked, data)

    monkeypatch.setattr(StageContext, "_on_tensor", count)
    path = write_random_gguf(tmp_path / "model.gguf", SPARSE, "Q8_0")
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as opened:
        for stop, is_asked in ((4, [False, True, False, False, True]), (2, [True] * 5)):
            executor, position, found = open_stage(opened, 0, stop), 0, []
            for rows in (1, 3, 1, 1, 3):
                asked.clear()
                segment = Segment(1, position, rows, rows if stop == 4 else 0)
                executor.step([segment], TOKENS[position : position + rows])
                found.append(bool(asked))
                position += rows
            executor.close()
            assert found == is_asked
