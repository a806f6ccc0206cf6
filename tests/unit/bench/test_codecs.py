from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardcompute.bench.codecs import CodecBench, cut_evenly, run_codec_bench
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny_checkpoint import HIDDEN, save_tiny_llama


@pytest.fixture
def bench(tmp_path: Path) -> dict[str, Any]:
    model = save_tiny_llama(tmp_path / "tiny")
    data = tmp_path / "texts.jsonl"
    texts = ["one word follows another", "and then comes the last"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = lambda: resolve(parse_reference(str(model)), load_settings())  # noqa: E731
    return {"files": files, "data": data, "forms": ["float32"], "threads": 1, "texts": 2}


def test_losses_grow_as_bytes_shrink(bench: dict[str, Any]) -> None:
    names = ["exact", "exact+deflate", "bf16", "int8"]
    results = run_codec_bench(CodecBench(**bench, cuts=[2], codecs=names), lambda _: None)
    found = {(each.labels["codec"], each.metric): each.value for each in results}
    assert [found[name, "bytes_per_token"] for name in names if "deflate" not in name] == [
        2 * 4 * HIDDEN,
        2 * 2 * HIDDEN,
        2 * (HIDDEN + 2),
    ]
    assert found["exact+deflate", "bytes_per_token"] < found["exact", "bytes_per_token"]
    for lossless in ("exact", "exact+deflate"):
        assert found[lossless, "mean_kl"] == found[lossless, "perplexity_change"] == 0
        assert found[lossless, "greedy_agreement"] == 1
    assert 0 < found["bf16", "mean_kl"] < found["int8", "mean_kl"] < 0.1


def test_cuts_cover_every_layer() -> None:
    assert [(stage.start, stage.stop) for stage in cut_evenly(30, 5)] == [
        (0, 5),
        (5, 10),
        (10, 15),
        (15, 20),
        (20, 25),
        (25, 30),
    ]
    for cuts in range(1, 7):
        stages = cut_evenly(7, cuts)
        assert [stage.start for stage in stages[1:]] == [stage.stop for stage in stages[:-1]]
        assert all(stage.start < stage.stop for stage in stages)


@pytest.mark.parametrize(
    ("given", "said"), [({"codecs": ["int3"]}, "no codec 'int3'"), ({"cuts": [6]}, "cannot be cut 6 times")]
)
def test_what_cannot_be_measured_is_said(bench: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_codec_bench(CodecBench(**bench, **given), lambda _: None)
