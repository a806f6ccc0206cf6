"""Tiny random checkpoints of every family, and what `transformers` computes with them.

`FAMILIES[name]()` is a configuration, `save_tiny` a folder with its random weights, `reference_logits` the
truth. Windows are shorter than the prompts of the tests, and every norm, bias and sink is random, so that a
forgotten one shows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers
from numpy.typing import NDArray

VOCABULARY = 160
_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "partial_rotary_factor": 0.75,
}

_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
}


def _config(kind: str, /, **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        return getattr(transformers, f"{kind}Config")(**{**_SIZES, **changes})

    return make


FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": _config("Llama"),
    "llama-tied": _config("Llama", tie_word_embeddings=True),
    "llama-mha": _config("Llama", num_key_value_heads=4),
    "llama-mqa": _config("Llama", num_key_value_heads=1, head_dim=32),
    "llama-biases": _config("Llama", attention_bias=True, mlp_bias=True),
    "llama-gelu": _config("Llama", hidden_act="gelu"),
    "llama-llama3": _config("Llama", rope_parameters=_LLAMA3),
    "llama-linear": _config(
        "Llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "llama-yarn": _config("Llama", rope_parameters=_YARN),
    "mistral": _config("Mistral", sliding_window=6),
    "mistral-full": _config("Mistral", sliding_window=None, head_dim=32),
    "qwen2": _config("Qwen2"),
    "qwen2-tied": _config("Qwen2", tie_word_embeddings=True),
    "qwen2-window": _config("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": _config("Qwen3", head_dim=32),
    "qwen3-biases": _config("Qwen3", head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "gemma2": _config("Gemma2", head_dim=32, sliding_window=5, query_pre_attn_scalar=24),
    "gemma2-capped": _config(
        "Gemma2",
        head_dim=16,
        sliding_window=4,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.5,
        query_pre_attn_scalar=16,
    ),
    "gemma3": _config(
        "Gemma3Text", head_dim=32, sliding_window=5, sliding_window_pattern=3, query_pre_attn_scalar=32
    ),
    "gemma3-linear": _config(
        "Gemma3Text",
        head_dim=16,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        final_logit_softcapping=3.0,
    ),
    "phi3": _config("Phi3"),
    "phi3-window": _config("Phi3", sliding_window=6, num_key_value_heads=4),
    "phi3-longrope": _config("Phi3", rope_parameters=_LONGROPE, original_max_position_embeddings=64),
    "olmo2": _config("Olmo2"),
    "olmo2-biases": _config("Olmo2", attention_bias=True, num_key_value_heads=4),
    "smollm3": _config("SmolLM3", num_hidden_layers=4),
    "smollm3-window": _config(
        "SmolLM3",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=5,
        no_rope_layer_interval=2,
        tie_word_embeddings=False,
    ),
    "mixtral": _config("Mixtral", num_local_experts=4),
    "mixtral-window": _config("Mixtral", num_local_experts=5, num_experts_per_tok=3, sliding_window=6),
    "qwen3-moe": _config(
        "Qwen3Moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "qwen3-moe-mixed": _config(
        "Qwen3Moe",
        num_hidden_layers=4,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=False,
        mlp_only_layers=[0],
        decoder_sparse_step=2,
    ),
    "qwen2-moe": _config(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=80,
    ),
    "qwen2-moe-mixed": _config(
        "Qwen2Moe",
        num_hidden_layers=4,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "deepseek-v2": _config(
        "DeepseekV2", **_LATENT, q_lora_rank=24, n_routed_experts=6, rope_parameters=_YARN
    ),
    "deepseek-v2-lite": _config(
        "DeepseekV2",
        **{**_LATENT, "first_k_dense_replace": 1},
        q_lora_rank=None,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.7,
        rope_parameters={**_YARN, "mscale": 0.5, "mscale_all_dim": 0.707},
    ),
    "deepseek-v2-grouped": _config(
        "DeepseekV2",
        **{**_LATENT, "first_k_dense_replace": 1},
        q_lora_rank=None,
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.7,
        rope_parameters={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-v3": _config(
        "DeepseekV3",
        **{**_LATENT, "first_k_dense_replace": 1},
        q_lora_rank=24,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-halves": _config(
        "DeepseekV3",
        **_LATENT,
        q_lora_rank=None,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "kimi-k2": _config(
        "DeepseekV3",
        **{**_LATENT, "num_hidden_layers": 4, "first_k_dense_replace": 1},
        q_lora_rank=32,
        n_routed_experts=12,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        rope_parameters={**_YARN, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "gpt-oss": _config("GptOss", head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss-clamped": _config(
        "GptOss",
        head_dim=32,
        sliding_window=6,
        num_local_experts=3,
        num_experts_per_tok=3,
        swiglu_limit=0.7,
        tie_word_embeddings=True,
    ),
    "glm": _config("Glm", head_dim=16),
    "glm4": _config("Glm4", head_dim=32, attention_bias=True),
    "glm4-plain": _config("Glm4", head_dim=16, attention_bias=False, partial_rotary_factor=1.0),
    "granite": _config(
        "Granite",
        embedding_multiplier=3.0,
        logits_scaling=1.7,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        attention_bias=True,
        mlp_bias=True,
    ),
    "cohere": _config("Cohere", logit_scale=0.3, attention_bias=True),
    "cohere2": _config("Cohere2", num_hidden_layers=4, sliding_window=5, logit_scale=0.25),
    "seed-oss": _config("SeedOss", head_dim=32),
    "seed-oss-biases": _config(
        "SeedOss", head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "ernie4.5": _config("Ernie4_5", head_dim=32),
    "ernie4.5-biases": _config("Ernie4_5", head_dim=16, use_bias=True, tie_word_embeddings=False),
    "exaone4": _config("Exaone4", num_hidden_layers=4, sliding_window=5),
    "exaone4-full": _config("Exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "olmo3": _config(
        "Olmo3",
        num_hidden_layers=4,
        sliding_window=5,
        rope_parameters={
            "full_attention": {**_YARN, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "hunyuan": _config("HunYuanDenseV1", head_dim=32),
    "hunyuan-alpha": _config(
        "HunYuanDenseV1",
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "alpha": 20.0, "factor": 1.0, "rope_theta": 1e4},
    ),
    "nemotron": _config("Nemotron", head_dim=32, attention_bias=True, mlp_bias=True),
    "arcee": _config("Arcee", mlp_bias=True),
    "glm4-moe": _config(
        "Glm4Moe",
        head_dim=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.7,
        attention_bias=True,
        use_qk_norm=True,
        num_mtp_layers=0,
    ),
    "glm4-moe-plain": _config(
        "Glm4Moe",
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_mtp_layers=0,
    ),
    "dots1": _config(
        "Dots1",
        n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=5,
        max_window_layers=2,
    ),
    "dots1-full": _config(
        "Dots1",
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        sliding_window=None,
    ),
    "ernie4.5-moe": _config(
        "Ernie4_5_Moe",
        moe_intermediate_size=32,
        moe_num_experts=6,
        moe_k=3,
        moe_num_shared_experts=2,
    ),
    "minimax-m2": _config(
        "MiniMaxM2",
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        rotary_dim=16,
    ),
    "hunyuan-moe": _config("HunYuanMoEV1", head_dim=16, num_experts=6, moe_topk=3),
    "olmoe": _config("Olmoe", num_experts=6, num_experts_per_tok=3),
    "granite-moe": _config(
        "GraniteMoe",
        num_local_experts=6,
        num_experts_per_tok=3,
        embedding_multiplier=3.0,
        logits_scaling=1.7,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
    ),
    "granite-moe-shared": _config(
        "GraniteMoeShared",
        num_local_experts=4,
        shared_intermediate_size=48,
        attention_bias=True,
        attention_multiplier=0.2,
    ),
    "granite4-dense": _config(
        "GraniteMoeHybrid",
        num_local_experts=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
        layer_types=["full_attention"] * 3,
        mamba_n_heads=8,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
    ),
    "granite4-moe": _config(
        "GraniteMoeHybrid",
        num_local_experts=4,
        shared_intermediate_size=48,
        position_embedding_type=None,
        layer_types=["full_attention"] * 3,
        mamba_n_heads=8,
        attention_multiplier=0.2,
    ),
    "llama4": _config(
        "Llama4Text",
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size=32,
        intermediate_size_mlp=96,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=7,
        floor_scale=5,
        attn_scale=0.4,
    ),
    "llama4-scout": _config(
        "Llama4Text",
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size=32,
        intermediate_size_mlp=96,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        rope_parameters=_LLAMA3,
    ),
    "llama4-every": _config(
        "Llama4Text",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        no_rope_layer_interval=2,
        attention_chunk_size=6,
    ),
    "ministral3": _config(
        "Ministral3",
        head_dim=16,
        rope_parameters={
            **_YARN,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
}


def _seeing(kind: str, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Callable[[], Any]:
    def make() -> Any:
        texts, sizes = {**_SIZES, **text}, {**_VISION, **vision}
        return getattr(transformers, f"{kind}Config")(text_config=texts, vision_config=sizes)

    return make


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
SEEING: Mapping[str, Callable[[], Any]] = {
    "gemma3-seeing": _seeing("Gemma3", {"head_dim": 16, "sliding_window": 5}, {}),
    "mistral3-seeing": _seeing(
        "Mistral3", {"model_type": "mistral", "head_dim": 16}, {"model_type": "pixtral"}
    ),
    "ministral3-seeing": _seeing(
        "Mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1},
        },
        {"model_type": "pixtral"},
    ),
    "llama4-seeing": _seeing(
        "Llama4",
        {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 7, "no_rope_layer_interval": 2},
        {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "qwen2.5-seeing": _seeing("Qwen2_5_VL", {"rope_parameters": _MROPE}, _QWEN_VISION),
    "qwen3-seeing": _seeing(
        "Qwen3VL",
        {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3-moe-seeing": _seeing(
        "Qwen3VLMoe",
        {
            "head_dim": 16,
            "rope_parameters": _MROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
        {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
}
"""Models that also see, whose text part is run."""


def save_tiny(name: str, folder: Path, vocabulary: int | None = None) -> Path:
    """A checkpoint of configuration `name` in `folder`, the same in every run."""
    torch.manual_seed(sum(name.encode()))
    with _quiet():
        kind = (
            transformers.AutoModelForImageTextToText if name in SEEING else transformers.AutoModelForCausalLM
        )
        config = SEEING[name]() if name in SEEING else FAMILIES[name]()
        if vocabulary is not None:
            config.vocab_size = vocabulary
        model = kind.from_config(config, dtype=torch.float32)
        _randomise(model)
        model.save_pretrained(folder)
    if config.model_type == "qwen3_vl_moe":
        _transpose_experts(folder / "model.safetensors")
    return folder


def _transpose_experts(path: Path) -> None:
    """As published: `transformers` turns them when it reads and leaves them so when it writes."""
    tensors = safetensors.numpy.load_file(path)
    for name, values in tensors.items():
        if ".experts." in name:
            tensors[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


def save_tiny_talker(name: str, folder: Path, words: Path, *, layers: int = 6) -> Path:
    """Configuration `name` with the tokenizer of the checkpoint at `words` and `layers` layers: one that can answer."""
    vocabulary = read_config(words)["vocab_size"]
    config = FAMILIES[name]()
    config.num_hidden_layers, config.vocab_size, config.max_position_embeddings = layers, vocabulary, 512
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    config.bos_token_id, config.eos_token_id = vocabulary - 2, vocabulary - 1
    torch.manual_seed(sum(name.encode()))
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model)
        torch.nn.init.normal_(model.lm_head.weight, std=0.25)
        model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((words / file).read_bytes())
    return folder


def reference_logits(folder: Path, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits `[len(ids), vocabulary]` of one forward over all of `ids`."""
    with _quiet(), torch.no_grad():
        sees = "vision_config" in read_config(folder)
        kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model.eval()
        logits: NDArray[np.float32] = model(torch.tensor([list(ids)])).logits[0].numpy()
    return logits


def tiny_names(config: Any) -> list[str]:
    """The tensors of a model of this configuration, as its modules name them, without making any."""
    with _quiet(), torch.device("meta"):
        return list(transformers.AutoModelForCausalLM.from_config(config).state_dict())


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


_CENTRED = ("Gemma", "Nemotron")
"""Models whose norms add 1 to their weights."""


def _randomise(model: Any) -> None:
    """Weights that keep logits around 1, norms around 1, biases and sinks that matter."""
    biases = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith("_bias")]
    for name, weight in (*model.named_parameters(), *biases):
        if name.endswith("norm.weight"):
            centre = 0.0 if type(model).__name__.startswith(_CENTRED) else 1.0
            torch.nn.init.normal_(weight, mean=centre, std=0.3)
        elif weight.dim() == 1 or name.endswith("_bias"):
            torch.nn.init.normal_(weight, std=0.5)
        elif "embed_tokens" in name or "lm_head" in name:
            torch.nn.init.normal_(weight, std=0.125)
        else:
            width = weight.shape[-1]
            torch.nn.init.normal_(weight, std=1.5 * width**-0.5)
    for name, values in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(values, std=0.5)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """`transformers` talks about tiny models; their warnings are not about ours."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
