"""Models that only `transformers` knows: whole and cut, they give what `transformers` gives."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CapacityError, UnsupportedModelError, UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from shardcompute.backends.transformers_fallback import TransformersExecutor, layer_count  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {"intermediate_size": 48},
    "StableLm": {"intermediate_size": 48, "num_key_value_heads": 2},
    "Cohere": {"intermediate_size": 48, "num_key_value_heads": 2, "logit_scale": 0.3},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPT2": {"n_inner": 48},
}
OPTIONS = ExecutorOptions(kv_bytes=1 << 22, context_length=128)
IDS = np.asarray([(7 * i * i + 3 * i + 5) % 96 for i in range(24)], dtype=np.int64)


def save(kind: str, folder: Path) -> Path:
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


def expected_logits(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model.eval()(torch.from_numpy(IDS)[None]).logits[0].numpy()


def run(stages: Sequence[TransformersExecutor], segments: Sequence[Segment]) -> Any:
    x = np.concatenate([IDS[s.start : s.stop] for s in segments])
    for stage in stages:
        x = stage.step(segments, x)
    return x


def test_whole_and_cut_models_give_their_logits(folder: Path) -> None:
    count = layer_count(folder)
    assert count == 3
    truth = expected_logits(folder)
    whole = [TransformersExecutor(folder, 0, count, OPTIONS)]
    cut = [TransformersExecutor(folder, 0, 1, OPTIONS), TransformersExecutor(folder, 1, count, OPTIONS)]
    steps = [
        [Segment(1, 0, 9, 2)],
        [Segment(1, 9, 3, 1), Segment(2, 0, 12, 12)],
        [Segment(1, 10, 1, 1), Segment(2, 5, 7, 0)],
        [Segment(2, 12, 12, 12)],
    ]
    for segments in steps:
        ours, parts = run(whole, segments), run(cut, segments)
        judged = [row for s in segments for row in range(s.stop - s.logit_rows, s.stop)]
        np.testing.assert_allclose(ours, truth[judged], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(parts, ours)


def test_sessions_are_counted_and_closed(tmp_path: Path) -> None:
    executor = TransformersExecutor(save("GPTNeoX", tmp_path), 0, 2, OPTIONS)
    executor.step([Segment(5, 0, 8)], IDS[:8])
    usage = executor.kv_usage()
    # 2 layers × key and value × 32 numbers × 4 bytes × a page of 64 tokens
    assert usage.used_bytes == 2 * 2 * 32 * 4 * 64
    assert executor.session_length(5) == 8
    with pytest.raises(UsageError):
        executor.step([Segment(5, 9, 1)], IDS[9:10])
    with pytest.raises(UsageError):
        executor.step([Segment(5, 8, 2)], IDS[9:10])
    executor.close_session(5)
    assert executor.kv_usage().sessions == 0


def test_too_little_kv_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        TransformersExecutor(save("GPTNeoX", tmp_path), 0, 3, ExecutorOptions(kv_bytes=1000))


def test_stages_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        TransformersExecutor(save("GPTNeoX", tmp_path), 1, 4, OPTIONS)


def test_models_whose_state_cannot_be_truncated_are_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=4, pad_token_id=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModelError):
            TransformersExecutor(tmp_path, 0, 2, OPTIONS)


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UnsupportedModelError):
        layer_count(tmp_path)


def test_weights_that_could_hold_code_are_not_read(tmp_path: Path) -> None:
    """A pickle is a program; `transformers` takes one where there is nothing else."""
    folder = save("GPT2", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        TransformersExecutor(folder, 0, 3, OPTIONS)
