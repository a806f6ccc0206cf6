"""Checkpoints that MLX has quantised give, on every backend, the logits of the same numbers in `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.core.settings import Settings
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.mlx_checkpoint import quantise_folder
from support.models.tiny import VOCABULARY, read_config, reference_logits, save_tiny

IDS = np.random.default_rng(11).integers(3, VOCABULARY, 20)
OPTIONS = ExecutorOptions(kv_bytes=1 << 24, max_rows=64, context_length=64)
FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "qwen3-moe-mixed", "gpt-oss")


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


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return quantise_folder(save_tiny(request.param, folder / "plain"), folder, bits=4, group_size=32)


@pytest.mark.parametrize("backend", ["numpy", "onnx", "torch", "mlx"])
def test_every_backend_gives_the_logits_of_transformers(backend: str, folders: tuple[Path, Path]) -> None:
    quantised, dense = folders
    # The ONNX kernels round activations where weights are in blocks; widened weights show what was read.
    form = "float32" if backend == "onnx" else "native"
    np.testing.assert_allclose(
        logits(quantised, backend, form), reference_logits(dense, IDS.tolist()), atol=2e-4
    )


def test_onnx_multiplies_the_blocks_as_they_are(folders: tuple[Path, Path]) -> None:
    quantised, dense = folders
    ours, theirs = logits(quantised, "onnx"), reference_logits(dense, IDS.tolist())
    assert np.linalg.norm(ours - theirs) <= 0.1 * np.linalg.norm(theirs)


def test_mixed_bits_and_groups(tmp_path: Path) -> None:
    overrides = {
        "model.embed_tokens": {"bits": 8, "group_size": 32},
        "model.layers.0.self_attn.q_proj": {"bits": 6, "group_size": 32},
        "model.layers.1.mlp.gate_proj": {"bits": 3, "group_size": 64},
    }
    plain = save_tiny("llama", tmp_path / "plain")
    quantised, dense = quantise_folder(plain, tmp_path, bits=5, group_size=64, overrides=overrides)
    assert "quantization" in read_config(quantised)
    expected = reference_logits(dense, IDS.tolist())
    for backend in ("numpy", "mlx"):
        np.testing.assert_allclose(logits(quantised, backend), expected, atol=2e-4)


def test_what_mlx_wrote_is_described(tmp_path: Path) -> None:
    quantised, _ = quantise_folder(save_tiny("llama", tmp_path / "plain"), tmp_path)
    config = quantised / "config.json"
    config.write_text(config.read_text().replace('"affine"', '"nvfp4"'))
    with pytest.raises(UnsupportedModelError, match="nvfp4"):
        opened(quantised)
