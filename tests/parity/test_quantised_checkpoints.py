"""Checkpoints in every published quantised form give the logits of the same numbers in `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.core.settings import Settings
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import VOCABULARY, reference_logits, save_tiny
from support.quantised.checkpoint import FORMS, Stored, quantise_folder, save_tensors, tensor

IDS = np.random.default_rng(11).integers(3, VOCABULARY, 20)
OPTIONS = ExecutorOptions(kv_bytes=1 << 24, max_rows=64, context_length=64)
# Forms on families whose layout differs: fused matrices, experts one by one, biases, tied heads.
OTHERS = [
    ("phi3", "gptq4"),
    ("phi3", "fp8-blocks"),
    ("llama-biases", "awq"),
    ("qwen2-tied", "int4-asymmetric"),
    ("gemma3", "nf4-nested"),
    ("gpt-oss", "mxfp4"),
    ("gpt-oss-clamped", "mxfp4"),
]


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=folder.parent)))


def logits(folder: Path, backend: str, form: str = "native") -> Float32:
    if backend in ("torch", "mlx"):
        pytest.importorskip(backend)
    with opened(folder) as checkpoint:
        executor = open_shard(checkpoint, backend=backend, form=form, options=OPTIONS)
    rows = np.array(executor.step([Segment(1, 0, len(IDS), len(IDS))], IDS))
    executor.close()
    return rows


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama") / "plain")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_logits_of_transformers(form: str, llama: Path, tmp_path: Path) -> None:
    quantised, dense = quantise_folder(llama, tmp_path, form)
    expected = reference_logits(dense, IDS.tolist())
    assert not np.allclose(expected, reference_logits(llama, IDS.tolist()), atol=2e-4)
    np.testing.assert_allclose(logits(quantised, "numpy"), expected, atol=2e-4)


@pytest.mark.parametrize("backend", ["onnx", "torch", "mlx"])
@pytest.mark.parametrize("form", FORMS)
def test_every_backend_gives_the_logits_of_transformers(
    backend: str, form: str, llama: Path, tmp_path: Path
) -> None:
    quantised, dense = quantise_folder(llama, tmp_path, form)
    # The ONNX kernels round activations where weights are in blocks; widened weights show what was read.
    ours = logits(quantised, backend, "float32" if backend == "onnx" else "native")
    expected = reference_logits(dense, IDS.tolist())
    np.testing.assert_allclose(ours, expected, atol=2e-4)
    if backend == "onnx":
        blocks = logits(quantised, backend)
        assert np.linalg.norm(blocks - expected) <= 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("backend", ["onnx", "torch", "mlx"])
def test_gpt_oss_runs_whole_on_every_backend(backend: str, tmp_path: Path) -> None:
    quantised, dense = quantise_folder(save_tiny("gpt-oss", tmp_path / "plain"), tmp_path, "mxfp4")
    ours = logits(quantised, backend, "float32" if backend == "onnx" else "native")
    np.testing.assert_allclose(ours, reference_logits(dense, IDS.tolist()), atol=2e-4)


@pytest.mark.parametrize(("family", "form"), OTHERS)
def test_other_families_do_as_well(family: str, form: str, tmp_path: Path) -> None:
    quantised, dense = quantise_folder(save_tiny(family, tmp_path / "plain"), tmp_path, form)
    np.testing.assert_allclose(logits(quantised, "numpy"), reference_logits(dense, IDS.tolist()), atol=2e-4)


def test_biases_that_gptq_writes_beside_every_matrix_must_be_zero(llama: Path, tmp_path: Path) -> None:
    quantised, dense = quantise_folder(llama, tmp_path, "gptq4")
    path = quantised / "model.safetensors"
    parts: Stored = {name: tensor(values) for name, values in load_file(path).items()}
    rows = {name.removesuffix(".qweight"): v.shape[1] for name, (_, v) in parts.items() if ".qweight" in name}
    biases: Stored = {f"{module}.bias": tensor(np.zeros(count, np.float16)) for module, count in rows.items()}
    save_tensors(path, parts | biases)
    expected = reference_logits(dense, IDS.tolist())
    np.testing.assert_allclose(logits(quantised, "numpy"), expected, atol=2e-4)
    name = "model.layers.1.mlp.up_proj.bias"
    save_tensors(path, parts | biases | {name: tensor(np.full(96, 0.5, np.float16))})
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.bias.* is a bias"):
        logits(quantised, "numpy")
