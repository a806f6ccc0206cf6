"""The MLX executor against the numpy oracle, on random networks with every feature a family may have.

On Linux this is MLX on the CPU, slow and in float32 by default; the GPU of a Mac computes the same primitives.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.footprint import MatrixForm, matrix_bytes
from shardcompute.core.batch import Segment
from shardcompute.core.errors import BackendError, CapacityError, UsageError
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import Experts, Layer, ModelSpec, Stage, cut, whole
from support.models.random_networks import (
    CONTEXT,
    DENSE,
    FORMS,
    KV_BYTES,
    SPECS,
    STEPS,
    VOCABULARY,
    RandomSource,
    assert_close,
    ids_of,
    make_spec,
    oracle,
    run_all,
    run_chain,
)

mx = pytest.importorskip("mlx.core", reason="mlx is not installed (pip install 'shardcompute[mlx]')")
from shardcompute.backends.mlx import MlxExecutor  # noqa: E402
from shardcompute.backends.mlx.weights import load_map  # noqa: E402

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="mlx compiles for CPUs with g++, which is not installed"
)


def make(
    spec: ModelSpec,
    stage: Stage | None = None,
    form: str = "dense",
    compiles: bool | None = None,
    **options: Any,
) -> MlxExecutor:
    chosen = ExecutorOptions(kv_bytes=KV_BYTES, context_length=CONTEXT, **options)
    network = Decoder(spec, stage or whole(spec), RandomSource(spec, form))
    return MlxExecutor(network, chosen, compiles=compiles)


@pytest.mark.parametrize("name", SPECS)
def test_every_feature_as_the_oracle_computes_it(name: str) -> None:
    assert_close(run_all(make(SPECS[name])), run_all(oracle(SPECS[name])), 2e-4)


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_as_the_oracle_computes_them(form: str) -> None:
    spec = make_spec(has_qkv_bias=True)
    assert_close(run_all(make(spec, form=form)), run_all(oracle(spec, form)), 2e-4)


@pytest.mark.parametrize("form", FORMS)
def test_quantised_experts_as_the_oracle_computes_them(form: str) -> None:
    spec = make_spec(layers=(Layer(is_sparse=True),), experts=Experts(5, 2, 64, has_bias=True))
    assert_close(run_all(make(spec, form=form)), run_all(oracle(spec, form)), 2e-4)


@needs_compiler
def test_compiled_steps_as_the_oracle_computes_them_whole_or_cut() -> None:
    spec, steps = SPECS["plain"], STEPS[:2]
    compiled = run_all(make(spec, compiles=True), steps)
    assert_close(compiled, run_all(oracle(spec), steps), 2e-4)
    stages = [make(spec, stage, compiles=True) for stage in cut(spec, spec.layer_count)]
    for a, b in zip(run_chain(stages, steps), compiled, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
def test_every_feature_compiled(name: str) -> None:
    spec = SPECS[name]
    compiled = run_all(make(spec, compiles=True))
    assert_close(compiled, run_all(oracle(spec)), 2e-4)
    stages = [make(spec, stage, compiles=True) for stage in cut(spec, spec.layer_count)]
    for a, b in zip(run_chain(stages), compiled, strict=True):
        np.testing.assert_array_equal(a, b)


def test_compiled_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.backends.mlx.executor.MAX_SHAPES", 2)
    executor = make(SPECS["plain"])
    run_all(executor)
    assert len(executor._functions) == 2


@pytest.mark.parametrize("name", ["plain", "gemma", "sinks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cut_model_computes_the_same_bits(name: str, dtype: str) -> None:
    spec = SPECS[name]
    stages = [make(spec, stage, dtype=dtype) for stage in cut(spec, spec.layer_count)]
    for a, b in zip(run_chain(stages), run_all(make(spec, dtype=dtype)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", DENSE)  # rounding may send a row to another expert
def test_sixteen_bits_stay_near_the_oracle(name: str, dtype: str) -> None:
    ours = run_all(make(SPECS[name], dtype=dtype))
    for a, b in zip(ours, run_all(oracle(SPECS[name])), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


@pytest.mark.parametrize("form", FORMS)
def test_quantised_in_sixteen_bits_stays_near_the_oracle(form: str) -> None:
    spec = make_spec(has_qkv_bias=True)
    ours = run_all(make(spec, form=form, dtype="bfloat16"))
    for a, b in zip(ours, run_all(oracle(spec, form)), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


@pytest.mark.parametrize("form", ["dense", "int4-shift"])
def test_rows_on_cpus_do_not_depend_on_their_batch(form: str) -> None:
    spec = make_spec(qk_norm="head", hidden=128, intermediate=256)
    together, alone, at_once = (make(spec, form=form, device="cpu") for _ in range(3))
    prompts = [Segment(session, 0, 60 + 9 * session, 1) for session in range(5)]
    for prompt in prompts:
        run_all(together, [[prompt]])
        run_all(
            alone, [[Segment(prompt.session, 0, 7, 1)], [Segment(prompt.session, 7, prompt.count - 7, 1)]]
        )
    nexts = [Segment(p.session, p.stop, 1, 1) for p in prompts]
    joint = run_all(together, [nexts])[0]
    single = np.concatenate(run_all(alone, [[segment] for segment in nexts]))
    np.testing.assert_array_equal(joint, single)
    whole_prompt = run_all(at_once, [[Segment(4, 0, prompts[4].count + 1, 1)]])[0]
    np.testing.assert_array_equal(whole_prompt[0], single[4])


def held_bytes(part: Any) -> int:
    arrays = [getattr(part, field.name) for field in dataclasses.fields(part)]
    return sum(
        held_bytes(each) if dataclasses.is_dataclass(each) else getattr(each, "nbytes", 0) for each in arrays
    )


@pytest.mark.parametrize("holder", ["mlx/cpu", "mlx/gpu"])
@pytest.mark.parametrize("form", ["dense", *FORMS])
def test_weights_take_what_the_footprint_says(form: str, holder: str) -> None:
    matrix = RandomSource(make_spec(hidden=256), form).matrix("mlp.gate")
    blocks = getattr(matrix, "blocks", matrix)
    stored = MatrixForm(32)
    if form != "dense":
        outliers = 3 / 256 if "mixed" in form else 0.0
        stored = MatrixForm(blocks.bits, blocks.block_size, blocks.shifts is not None, outliers)
    expected = matrix_bytes(holder, stored, *matrix.shape, 0)
    (part,) = load_map([matrix], None, mx.float32 if holder == "mlx/cpu" else mx.bfloat16).parts
    # Which columns were kept apart takes a few bytes more; blocks of 16 are widened with them.
    columns = 4 * 3 if form == "int4-shift-mixed" else 0
    assert held_bytes(part) == expected + columns


def test_steps_may_come_from_any_thread() -> None:
    executor, results = make(SPECS["plain"]), []
    expected = run_all(make(SPECS["plain"]))
    thread = threading.Thread(target=lambda: results.extend(run_all(executor)))
    thread.start()
    thread.join()
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_former_session_s_infinities_do_not_reach_the_next() -> None:
    spec = SPECS["plain"]
    executor, fresh = make(spec), make(spec)
    executor.step([Segment(1, 0, 40, 1)], ids_of([Segment(1, 0, 40, 1)]))
    for pools in (executor._kv.keys, executor._kv.values):
        for layer in range(len(pools)):
            pools[layer] = mx.full(pools[layer].shape, mx.inf)
    executor.close_session(1)
    segments = [Segment(2, 0, 5, 5)]
    ours, theirs = (each.step(segments, ids_of(segments)) for each in (executor, fresh))
    np.testing.assert_array_equal(ours, theirs)


def test_hidden_states() -> None:
    ours, theirs = make(SPECS["head-norm"]), oracle(SPECS["head-norm"])
    segments, ids = [Segment(1, 0, 9, 3)], np.arange(9) % VOCABULARY
    for executor in (ours, theirs):
        executor.step(segments, ids, keeps_hidden=True)
    assert_close([ours.hidden_rows()], [theirs.hidden_rows()], 1e-4)
    assert_close([ours.final_rows()], [theirs.final_rows()], 1e-4)
    ours.step([Segment(1, 9, 1, 1)], ids[:1])
    with pytest.raises(UsageError, match="kept no hidden"):
        ours.hidden_rows()
    with pytest.raises(UsageError, match="kept no final"):
        ours.final_rows()


def test_what_cannot_be_computed_is_refused_before_anything_changes() -> None:
    executor = make(SPECS["plain"], max_rows=8)
    with pytest.raises(UsageError, match="at most 8"):
        executor.step([Segment(1, 0, 9, 1)], np.zeros(9, dtype=np.int64))
    with pytest.raises(UsageError, match="token ids"):
        executor.step([Segment(1, 0, 1, 1)], np.asarray([VOCABULARY]))
    assert executor.sessions() == []
    network = Decoder(SPECS["plain"], whole(SPECS["plain"]), RandomSource(SPECS["plain"]))
    with pytest.raises(CapacityError, match="two pages"):
        MlxExecutor(network, ExecutorOptions(kv_bytes=100))


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="this machine has a GPU that mlx can use")
def test_a_gpu_that_is_not_there_is_said() -> None:
    with pytest.raises(BackendError, match="no GPU"):
        make(SPECS["plain"], device="mlx")
    with pytest.raises(UsageError, match="cannot compute on 'cuda'"):
        make(SPECS["plain"], device="cuda")
