"""Arms of `bench engine`: what each is compared with, and that plain llama.cpp computes what our backend does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.llamacpp.library import installed_version
from shardcompute.bench.engine import run
from shardcompute.bench.engine.plain_llamacpp import PlainLlamaEngine
from shardcompute.bench.engine.random_gguf import LlamaShape, named_shape, write_random_gguf
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve


def test_our_arms_are_compared_with_both_baselines_and_those_with_nothing() -> None:
    speeds = {run.TRANSFORMERS: [10.0, 20.0], "native": [20.0, 40.0], run.PLAIN: [40.0, 80.0]}
    found = {each.metric: each.value for each in run._speed_results("decode", 8, 1, "native", speeds)}
    assert found == {"decode": 30.0, "decode_vs_transformers": 2.0, "decode_vs_llamacpp": 0.5}
    assert [each.metric for each in run._speed_results("decode", 8, 1, run.PLAIN, speeds)] == ["decode"]


def test_a_shape_that_is_not_known_is_named() -> None:
    with pytest.raises(UsageError, match="'7b'"):
        named_shape("7b")


@pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_plain_llamacpp_computes_the_same_model(tmp_path: Path, dtype: str) -> None:
    shape = LlamaShape(2, 64, 96, 4, 2, 320, has_head=False)
    path = write_random_gguf(tmp_path / "model.gguf", shape, dtype)
    plain = PlainLlamaEngine(str(path), threads=1, sessions=2, context=256)
    assert plain.prefill(40) > 0
    assert plain.decode(2, 10, 3) > 0
    ids = np.arange(20)
    wanted = plain._compute(ids, np.arange(20), np.zeros(20), np.ones(20)).copy()
    with open_checkpoint(resolve(parse_reference(str(path)), load_settings())) as checkpoint:
        options = ExecutorOptions(kv_bytes=1 << 22, context_length=200)
        executor = open_shard(checkpoint, backend="llamacpp", options=options)
    got = executor.step([Segment(1, 0, 20, 20)], ids)
    executor.close()
    assert np.isfinite(got).all()
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()
