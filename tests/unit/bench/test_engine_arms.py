"""Arms of `bench engine`: what each is compared with, and that plain llama.cpp computes what our backend does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.llamacpp.library import installed_version
from shardcompute.bench.engine import run
from shardcompute.bench.engine.arm import TransformersEngine
from shardcompute.bench.engine.plain_llamacpp import PlainLlamaEngine
from shardcompute.bench.engine.random_gguf import (
    LlamaShape,
    named_shape,
    transformers_config,
    write_random_gguf,
)
from shardcompute.bench.engine.stopwatch import Spent
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.formats.tensor_file import read_matrix
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve


def test_our_arms_are_compared_with_both_baselines_and_those_with_nothing() -> None:
    spent = {
        run.TRANSFORMERS: [Spent(8.0, 9.0), Spent(4.0, 8.0)],
        "native": [Spent(4.0, 4.0), Spent(2.0, 5.0)],
        run.PLAIN: [Spent(2.0, 1.0), Spent(1.0, 2.0)],
    }
    found = {each.metric: each.value for each in run._speed_results("decode", 8, 2, "native", 80, spent)}
    assert found == {"decode": 30.0, "decode_vs_transformers": 2.0, "decode_vs_llamacpp": 0.5}
    alone = {each.metric: each.value for each in run._speed_results("decode", 8, 1, "native", 80, spent)}
    assert alone == {
        **found,
        "decode_vs_transformers_by_processor_time": 2.0,
        "decode_vs_llamacpp_by_processor_time": 0.25,
    }
    assert [each.metric for each in run._speed_results("decode", 8, 1, run.PLAIN, 80, spent)] == ["decode"]


def test_a_shape_that_is_not_known_is_named() -> None:
    with pytest.raises(UsageError, match="'7b'"):
        named_shape("7b")


@pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_plain_llamacpp_computes_the_same_model(tmp_path: Path, dtype: str) -> None:
    shape = LlamaShape(2, 64, 96, 4, 2, 320, has_head=False)
    path = write_random_gguf(tmp_path / "model.gguf", shape, dtype)
    plain = PlainLlamaEngine(str(path), threads=1, sessions=2, context=256)
    assert plain.prefill(40).clock_s > 0
    assert plain.prefill(40, wants_all=True).clock_s > 0
    assert plain.decode(2, 10, 3).clock_s > 0
    ids = np.arange(20)
    wanted = plain._compute(ids, np.arange(20), np.zeros(20), np.ones(20)).copy()
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as checkpoint:
        options = ExecutorOptions(kv_bytes=1 << 22, context_length=200)
        executor = open_shard(checkpoint, backend="llamacpp", options=options)
    got = executor.step([Segment(1, 0, 20, 20)], ids)
    executor.close()
    assert np.isfinite(got).all()
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        (LlamaShape(2, 64, 32, 4, 2, 320, has_head=False), "LlamaForCausalLM"),
        (LlamaShape(1, 64, 32, 4, 2, 320, experts=4, per_token=2), "MixtralForCausalLM"),
        (
            LlamaShape(2, 64, 32, 4, 2, 320, architecture="qwen3moe", head_size=32, experts=4, per_token=2),
            "Qwen3MoeForCausalLM",
        ),
    ],
    ids=["dense", "mixtral", "qwen3-moe"],
)
def test_transformers_computes_the_same_shape(tmp_path: Path, shape: LlamaShape, family: str) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "shape.json"
    config.write_text(json.dumps(transformers_config(shape)))
    engine = TransformersEngine(str(config), threads=1)
    assert type(engine._model).__name__ == family
    path = write_random_gguf(tmp_path / "model.gguf", shape, "F32")
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as checkpoint:
        stored = sum(math.prod(entry.shape) for entry in checkpoint.tensors.entries.values())
    assert sum(parameter.numel() for parameter in engine._model.parameters()) == stored
    assert engine.prefill(8).clock_s > 0
    assert engine.decode(2, 4, 2).clock_s > 0


def test_a_benchmark_of_random_weights_says_how_much_of_the_model_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[run.EngineBench] = []
    monkeypatch.setattr(run, "run_engine_bench", lambda bench, say: asked.append(bench) or [])
    shape = LlamaShape(1, 64, 32, 4, 2, 320, experts=4, per_token=2, model_layers=32)
    found = run.run_random_bench(run.EngineBench(""), shape, ["Q8_0"], tmp_path, lambda said: None)
    depth = next(each for each in found if each.metric == "depth")
    assert (depth.value, depth.unit) == (1, "layers of 32, each whole")
    assert json.loads(Path(asked[0].config_path).read_text())["num_local_experts"] == 4
    # Else an engine might compute its only layer for one row of a prompt.
    assert asked[0].wants_all


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_random_weights_keep_activations_about_as_they_are(tmp_path: Path, dtype: str) -> None:
    path = write_random_gguf(tmp_path / "model.gguf", LlamaShape(1, 256, 512, 4, 2, 320), dtype)
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as checkpoint:
        weights = read_matrix(checkpoint.tensors, "blk.0.ffn_up.weight").to_dense()
    assert 0.8 < weights.std() * 256**0.5 < 1.2
    assert abs(weights.mean()) < 0.2 * weights.std()
