"""Models that only `transformers` knows: whole and cut, they give what `transformers` gives."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.core.errors import (
    CapacityError,
    CorruptModelError,
    RowGapError,
    ShardComputeError,
    UnsupportedModelError,
    UsageError,
)
from shardcompute.core.settings import Settings
from shardcompute.models.families import is_fallback
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import FolderReference
from shardcompute.weights.sources.resolve import resolve

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PLAIN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**PLAIN, "intermediate_size": 48, "num_key_value_heads": 2}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
ATTENTIVE: dict[str, dict[str, Any]] = {
    "GPTNeoX": {**PLAIN, "intermediate_size": 48},
    "StableLm": GROUPED,
    "Cohere": {**GROUPED, "logit_scale": 0.3},
    "OPT": {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "GPT2": {**PLAIN, "n_inner": 48},
    "Bloom": PLAIN,
    "Starcoder2": {**GROUPED, "sliding_window": 8},
    "GptOss": {
        **GROUPED,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "Mamba": {**PLAIN, "state_size": 4},
    "Mamba2": {
        **PLAIN,
        "state_size": 4,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 4,
    },
    "Qwen3Next": {
        **GROUPED,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "FalconH1": {**GROUPED, **MAMBA2, "mamba_n_heads": 4, "mamba_d_ssm": 32, "head_dim": 8},
    "Bamba": {**GROUPED, **MAMBA2, "attn_layer_indices": [1, 3]},
}
UNCUTTABLE: dict[str, dict[str, Any]] = {
    "Gemma3nText": {
        **GROUPED,
        "head_dim": 8,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 1,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
}
MODELS = {**ATTENTIVE, **RECURRENT, **UNCUTTABLE}
CUTS = ([0, 4], [0, 2, 4], [0, 1, 3, 4])
OPTIONS = ExecutorOptions(kv_bytes=1 << 22, context_length=128)
IDS = np.asarray([(7 * i * i + 3 * i + 5) % 96 for i in range(24)], dtype=np.int64)


def save(kind: str, folder: Path, **options: Any) -> Path:
    torch.manual_seed(len(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.15)
        model.save_pretrained(folder, **options)
    return folder


def read(folder: Path) -> Checkpoint:
    return open_checkpoint(resolve(FolderReference(folder), Settings(data_dir=folder)), is_fallback=True)


def open_stages(folder: Path, edges: Sequence[int], options: ExecutorOptions = OPTIONS) -> list[Executor]:
    with read(folder) as checkpoint:
        stages = [Stage(a, b, edges[-1]) for a, b in itertools.pairwise(edges)]
        return [open_shard(checkpoint, stage=stage, options=options) for stage in stages]


def expected_logits(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model.eval()(torch.from_numpy(IDS)[None]).logits[0].numpy()


def run(stages: Sequence[Executor], segments: Sequence[Segment]) -> Any:
    x = np.concatenate([IDS[s.start : s.stop] for s in segments])
    for stage in stages:
        x = stage.step(segments, x)
    return x


def rows_of(segments: Sequence[Segment]) -> list[int]:
    return [row for s in segments for row in range(s.stop - s.logit_rows, s.stop)]


PREFILL_AND_DECODE = (
    [Segment(1, 0, 9, 2)],
    [Segment(1, 9, 3, 1), Segment(2, 0, 12, 12)],
    [Segment(1, 12, 1, 1), Segment(2, 12, 1, 0)],
    [Segment(2, 13, 11, 11)],
)
DRAFTS = (
    [Segment(1, 0, 9, 2)],
    [Segment(1, 9, 4, 4)],
    [Segment(1, 11, 3, 3)],
    [Segment(1, 13, 1, 1), Segment(2, 0, 7, 7)],
    [Segment(1, 0, 6, 6)],
)
"""Each begins before the one before it has ended."""


@pytest.fixture(scope="module", params=[*ATTENTIVE, *RECURRENT])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


def test_whole_and_cut_models_give_the_same_logits(folder: Path) -> None:
    """To the last bit between cuts: the same steps are computed, wherever the layers are."""
    truth = expected_logits(folder)
    results = [
        [run(stages, segments) for segments in PREFILL_AND_DECODE]
        for stages in (open_stages(folder, edges) for edges in CUTS)
    ]
    for segments, *ours in zip(PREFILL_AND_DECODE, *results, strict=True):
        np.testing.assert_allclose(ours[0], truth[rows_of(segments)], rtol=1e-4, atol=1e-4)
        for other in ours[1:]:
            np.testing.assert_array_equal(other, ours[0])


def test_drafts_are_cut_off(folder: Path) -> None:
    truth = expected_logits(folder)
    stages = open_stages(folder, [0, 1, 3, 4])
    for segments in DRAFTS:
        np.testing.assert_allclose(run(stages, segments), truth[rows_of(segments)], rtol=1e-4, atol=1e-4)


def test_stages_read_their_own_tensors_alone(tmp_path: Path) -> None:
    folder = save("Mixtral", tmp_path)
    with read(folder) as checkpoint:
        names: list[str] = []
        tensors = checkpoint.tensors

        class Watched:
            name, entries, metadata = tensors.name, tensors.entries, tensors.metadata

            def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
                names.append(name)
                return tensors.read_bytes(name, offset, length)

        object.__setattr__(checkpoint, "tensors", Watched())
        open_shard(checkpoint, stage=Stage(1, 3, 4), options=OPTIONS)
        object.__setattr__(checkpoint, "tensors", tensors)
    layers = {name.split(".")[2] for name in names if ".layers." in name}
    assert layers == {"1", "2"}
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert len(names) == len(set(names))


def test_checkpoints_in_several_files_are_read(tmp_path: Path) -> None:
    folder = save("StableLm", tmp_path, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()
    truth = expected_logits(folder)
    logits = run(open_stages(folder, [0, 2, 4]), [Segment(1, 0, 24, 24)])
    np.testing.assert_allclose(logits, truth, rtol=1e-4, atol=1e-4)


def test_models_whose_layers_share_more_than_rows_need_one_machine(tmp_path: Path) -> None:
    folder = save("Gemma3nText", tmp_path)
    truth = expected_logits(folder)
    logits = run(open_stages(folder, [0, 4]), [Segment(1, 0, 24, 24)])
    np.testing.assert_allclose(logits, truth, rtol=1e-3, atol=1e-3)
    with pytest.raises(ShardComputeError) as refused:
        open_stages(folder, [0, 2, 4])
    assert isinstance(refused.value, (UnsupportedModelError, CorruptModelError))
    with read(folder) as checkpoint:
        assert checkpoint.spec.is_whole


def test_the_text_part_of_a_model_for_images_is_run(tmp_path: Path) -> None:
    torch.manual_seed(5)
    text = {
        **GROUPED,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    eye = {**PLAIN, "intermediate_size": 48, "image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config=eye, mm_tokens_per_image=4)
    transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(
        tmp_path
    )
    truth = expected_logits(tmp_path)
    logits = run(open_stages(tmp_path, [0, 1, 3, 4]), [Segment(1, 0, 24, 24)])
    np.testing.assert_allclose(logits, truth, rtol=1e-4, atol=1e-4)


def test_a_far_cut_of_recurrent_states_is_a_gap(tmp_path: Path) -> None:
    """Whoever sent the rows fills it; from the beginning, a session can always be computed again."""
    folder = save("Mamba2", tmp_path)
    truth = expected_logits(folder)
    (stage,) = open_stages(folder, [0, 4])
    for start in range(0, 12, 3):
        stage.step([Segment(1, start, 3, 3)], IDS[start : start + 3])
    with pytest.raises(RowGapError):
        stage.step([Segment(1, 4, 1, 1)], IDS[4:5])
    assert stage.session_length(1) == 12
    logits = stage.step([Segment(1, 0, 5, 5)], IDS[:5])
    np.testing.assert_allclose(logits, truth[:5], rtol=1e-4, atol=1e-4)


def test_sessions_begin_with_what_others_hold(tmp_path: Path) -> None:
    folder = save("GPT2", tmp_path)
    truth = expected_logits(folder)
    stages = open_stages(folder, [0, 2, 4])
    run(stages, [Segment(1, 0, 12, 1)])
    for stage in stages:
        stage.adopt(1, 2, 8)
    logits = run(stages, [Segment(1, 12, 1, 1), Segment(2, 8, 3, 3)])
    np.testing.assert_allclose(logits, truth[[12, 8, 9, 10]], rtol=1e-4, atol=1e-4)


def test_sessions_are_counted_and_closed(tmp_path: Path) -> None:
    (executor, _) = open_stages(save("GPTNeoX", tmp_path), [0, 2, 4])
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
        open_stages(save("GPTNeoX", tmp_path), [0, 4], ExecutorOptions(kv_bytes=1000))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "no-such-model"}, "does not know the model type"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"intermediate_size": 1 << 22}, "where the checkpoint has"),
        ({"n_experts_used": 1 << 20}, "the most that is built"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, "quantised"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
        ({"num_hidden_layers": 5}, "5 numbered layers"),
    ],
)
def test_configurations_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = save("GPTNeoX", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ShardComputeError, match=reason):
        open_stages(folder, [0, 4])


def test_code_that_a_configuration_names_is_not_run(tmp_path: Path) -> None:
    folder = save("GPTNeoX", tmp_path)
    truth = expected_logits(folder)
    path = folder / "config.json"
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    named = {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "_attn_implementation": "somebody/kernels",
        "attn_implementation": "somebody/kernels",
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
    logits = run(open_stages(folder, [0, 4]), [Segment(1, 0, 24, 24)])
    np.testing.assert_allclose(logits, truth, rtol=1e-4, atol=1e-4)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save("GPTNeoX", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["gpt_neox.layers.2.mlp.dense_h_to_4h.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptModelError, match=r"layers\.2\.mlp\.dense_h_to_4h"):
        open_stages(folder, [0, 2, 4])


def test_weights_that_could_hold_code_are_not_read(tmp_path: Path) -> None:
    """A pickle is a program; `transformers` takes one where there is nothing else."""
    folder = save("GPT2", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ShardComputeError, match="safetensors"):
        read(folder)


def test_what_no_family_knows_falls_back(tmp_path: Path) -> None:
    files = resolve(FolderReference(save("GPTNeoX", tmp_path)), Settings(data_dir=tmp_path))
    with open_checkpoint(files) as checkpoint:
        assert is_fallback(checkpoint.spec)
        assert checkpoint.spec.family == "transformers:gpt_neox"
