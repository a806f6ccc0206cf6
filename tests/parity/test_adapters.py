"""Adapters beside a model, against `transformers` with W + B·A·scale in place of the weights: cut anywhere, in batches
where every row has another adapter, and with the very bits of the base for whoever chose none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import cut, whole
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, adapted, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import reference_logits, save_tiny
from support.models.tiny_gguf import tiny_gguf, write_gguf
from support.tiny_adapter import ALL, ATTENTION, save_adapter, save_merged

ON_CUDA = pytest.param(
    "torch/cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
BACKENDS = ("onnx", "numpy", "torch", ON_CUDA)
"""With the device, where it is none of a CPU; in float32 there."""
IDS = (5, 17, 3, 99, 42, 7, 7, 120, 64, 33, 8, 2, 77)
TARGETS = {
    "llama": ALL,
    "llama-biases": ALL,
    "qwen3": ATTENTION,
    "gemma2": ALL,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "olmo2": ("q_proj", "down_proj"),
    "nemotron": ("q_proj", "v_proj", "up_proj", "down_proj"),
    "cohere": ("q_proj", "k_proj", "o_proj", "up_proj"),
    "mixtral": ATTENTION,
}
OPTIONS = ExecutorOptions(kv_bytes=8 << 20, context_length=64, max_rows=64, max_logit_rows=64)


def opened(base: Path, beside: dict[str, Path] | None = None, merged: Path | None = None) -> Checkpoint:
    checkpoint = open_checkpoint(resolve(parse_reference(str(base)), load_settings()))
    return adapted(checkpoint, beside or {}, merged)


def stages_of(
    base: Path,
    beside: dict[str, Path],
    backend: str,
    count: int = 1,
    form: str = "native",
    dtype: str = "float32",
) -> list[Executor]:
    backend, _, device = backend.partition("/")
    options = replace(OPTIONS, device=device, dtype=dtype) if device else OPTIONS
    with opened(base, beside) as checkpoint:
        stages = cut(checkpoint.spec, count)
        return [
            open_shard(checkpoint, stage=each, backend=backend, form=form, options=options) for each in stages
        ]


def run(stages: list[Executor], segments: list[Segment], ids: tuple[int, ...] = IDS) -> NDArray[np.float32]:
    rows = np.concatenate([np.asarray(ids[each.start : each.stop]) for each in segments])
    for stage in stages:
        rows = stage.step(segments, rows).copy()
    return rows


def prompt(session: int, adapter: int, count: int = len(IDS)) -> Segment:
    return Segment(session, 0, count, count, adapter)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_is_its_sum_with_the_weights(family: str, backend: str, tmp_path: Path) -> None:
    base = save_tiny(family, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", targets=TARGETS[family])
    expected = reference_logits(save_merged(base, adapter, tmp_path / "merged"), IDS)
    without = reference_logits(base, IDS)
    assert np.abs(expected - without).max() > 0.1, "the adapter is to matter"
    stages = stages_of(base, {"own": adapter}, backend)
    np.testing.assert_allclose(run(stages, [prompt(1, 1)]), expected, atol=2e-3)
    np.testing.assert_allclose(run(stages, [prompt(2, 0)]), without, atol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_all_adapters_share_a_step_in_a_cut_model(backend: str, tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    folders = {
        "a": save_adapter(base, tmp_path / "a", seed=1),
        "b": save_adapter(base, tmp_path / "b", seed=2, rank=3, config={"use_rslora": True}),
        "c": save_adapter(base, tmp_path / "c", seed=3, rank=7, targets=("v_proj",), layers=(1,)),
    }
    expected = [reference_logits(base, IDS)]
    for name, folder in folders.items():
        expected.append(reference_logits(save_merged(base, folder, tmp_path / f"merged-{name}"), IDS))
    stages = stages_of(base, folders, backend, count=3)
    whole_prompts = [prompt(number, number) for number in range(4)]
    together = run(stages, whole_prompts)
    np.testing.assert_allclose(together, np.concatenate(expected), atol=2e-3)
    # Prompts again, of fewer tokens, and then token by token, all in the same steps.
    run(stages, [prompt(number, number, 5) for number in range(4)])
    for at in range(5, len(IDS)):
        rows = run(stages, [Segment(number, at, 1, 1, number) for number in range(4)])
        np.testing.assert_allclose(rows, [logits[at] for logits in expected], atol=2e-3)


@pytest.mark.parametrize("form", ["native", "int8", "int4"])
def test_rows_have_the_same_bits_in_any_company(form: str, tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    folders = {name: save_adapter(base, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    plain = run(stages_of(base, {}, "onnx", form=form), [prompt(0, 0)])
    stages = stages_of(base, folders, "onnx", form=form)
    alone = [run(stages, [prompt(number, number)]) for number in range(3)]
    np.testing.assert_array_equal(alone[0], plain)
    together = run(stages, [prompt(10 + number, number) for number in (2, 0, 1)])
    np.testing.assert_array_equal(together, np.concatenate([alone[2], alone[0], alone[1]]))
    cut_up = stages_of(base, folders, "onnx", count=3, form=form)
    np.testing.assert_array_equal(
        run(cut_up, [prompt(20 + number, number) for number in range(3)]), np.concatenate(alone)
    )


@pytest.mark.parametrize("family", TARGETS)
def test_whoever_chose_none_gets_the_bits_of_the_base(family: str, tmp_path: Path) -> None:
    base = save_tiny(family, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", targets=TARGETS[family])
    plain = run(stages_of(base, {}, "onnx"), [prompt(0, 0)])
    stages = stages_of(base, {"own": adapter}, "onnx")
    np.testing.assert_array_equal(run(stages, [prompt(0, 0)]), plain)
    mixed = run(stages, [prompt(1, 1), prompt(2, 0)])
    np.testing.assert_array_equal(mixed[len(IDS) :], plain)


@pytest.mark.parametrize("backend", [ON_CUDA])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
@pytest.mark.parametrize("form", ["native", "int4"])
def test_rows_on_cuda_have_the_same_bits_in_any_company(
    form: str, family: str, backend: str, tmp_path: Path
) -> None:
    base = save_tiny(family, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", targets=TARGETS[family])
    plain = run(stages_of(base, {}, backend, form=form, dtype="bfloat16"), [prompt(0, 0)])
    stages = stages_of(base, {"own": adapter}, backend, form=form, dtype="bfloat16")
    adapted = run(stages, [prompt(1, 1)])
    np.testing.assert_array_equal(run(stages, [prompt(0, 0)]), plain)
    mixed = run(stages, [prompt(2, 0), prompt(3, 1)])
    np.testing.assert_array_equal(mixed[: len(IDS)], plain)
    np.testing.assert_array_equal(mixed[len(IDS) :], adapted)
    # Token by token: in graphs where nobody chose an adapter.
    for number in (0, 1):
        run(stages, [Segment(4, 0, 5, 5, number)])
        rows = [run(stages, [Segment(4, at, 1, 1, number)]) for at in range(5, len(IDS))]
        np.testing.assert_array_equal(np.concatenate(rows), (plain, adapted)[number][5:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_merged_weights_are_the_same_model(family: str, backend: str, tmp_path: Path) -> None:
    base = save_tiny(family, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", targets=TARGETS[family])
    expected = reference_logits(save_merged(base, adapter, tmp_path / "merged"), IDS)
    with opened(base, merged=adapter) as checkpoint:
        name, _, device = backend.partition("/")
        options = replace(OPTIONS, device=device or "cpu", dtype="float32" if device else "auto")
        executor = open_shard(checkpoint, stage=whole(checkpoint.spec), backend=name, options=options)
    np.testing.assert_allclose(run([executor], [prompt(0, 0)]), expected, atol=2e-3)


@pytest.mark.parametrize("backend", ["mlx", "llamacpp"])
def test_other_backends_say_that_they_have_no_adapters(backend: str, tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    with pytest.raises(UnsupportedModelError, match="adapters beside a model are computed by onnx"):
        stages_of(base, {"own": adapter}, backend)


def test_a_base_in_gguf_takes_the_same_adapter(tmp_path: Path) -> None:
    """Its rows of q and k lie in another order."""
    base = save_tiny("llama", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    expected = reference_logits(save_merged(base, adapter, tmp_path / "merged"), IDS)
    file = write_gguf(tmp_path / "base.gguf", *tiny_gguf("llama", base))
    stages = stages_of(file, {"own": adapter}, "onnx", count=3)
    np.testing.assert_allclose(run(stages, [prompt(1, 1)]), expected, atol=2e-3)
    with pytest.raises(UnsupportedModelError, match="merged into plain numbers of a safetensors"):
        opened(file, merged=adapter)
