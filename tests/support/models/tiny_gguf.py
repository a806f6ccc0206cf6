"""The tiny checkpoints as GGUF files, converted here the way llama.cpp's converter does it.

Names come from the `gguf` package and the order of rotary rows from the format's definition: they prove ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from support.models.tiny import read_config
from support.models.tiny_checkpoint import save_tiny_llama

Tensors = dict[str, NDArray[np.float32]]

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "llama-tied": "llama",
    "llama-mqa": "llama",
    "llama-biases": "llama",
    "llama-llama3": "llama",
    "llama-linear": "llama",
    "llama-yarn": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2-tied": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3moe",
    "gemma2-capped": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi3-window": "phi3",
    "phi3-longrope": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "gpt-oss": "gpt-oss",
    "granite": "granite",
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "seed-oss": "seed_oss",
    "seed-oss-biases": "seed_oss",
    "ernie4.5": "ernie4_5",
    "ernie4.5-biases": "ernie4_5",
    "exaone4": "exaone4",
    "exaone4-full": "exaone4",
    "nemotron": "nemotron",
    "glm4": "glm4",
    "glm4-plain": "glm4",
    "olmoe": "olmoe",
    "minimax-m2": "minimax-m2",
    "dots1-full": "dots1",
    "glm4-moe": "glm4moe",
    "glm4-moe-plain": "glm4moe",
    "deepseek-v2": "deepseek2",
    "deepseek-v2-grouped": "deepseek2",
    "deepseek-v3": "deepseek2",
    "kimi-k2": "deepseek2",
    "qwen2-moe": "qwen2moe",
    "granite-moe": "granitemoe",
    "granite-moe-shared": "granitemoe",
    "ernie4.5-moe": "ernie4_5-moe",
    "hunyuan": "hunyuan-dense",
    "hunyuan-alpha": "hunyuan-dense",
    "hunyuan-moe": "hunyuan-moe",
    "llama4-scout": "llama4",
}
"""GGUF architecture of each tiny configuration that GGUF can express."""

_INTERLEAVED = ("llama", "smollm3", "granite", "granitemoe", "arcee")
"""Those whose rows the converter reorders; in others of that rotation the checkpoint has them so already."""
_UNSPLIT = ("deepseek-v2-grouped",)
"""Those that are written as older converters did it, with one map to keys and values."""
_SIGMOID = ("dots1", "glm4moe", "minimax-m2")
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "_sliding_window_pattern": "attention.sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}


def tiny_gguf(name: str, folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of the GGUF file of the checkpoint in `folder`."""
    config = read_config(folder)
    architecture = ARCHITECTURES[name]
    metadata = {
        f"{architecture}.{key}": config[field]
        for field, key in _KEYS.items()
        if config.get(field) is not None
    }
    metadata["general.architecture"] = architecture
    if (key_length := metadata.get(f"{architecture}.attention.key_length")) is not None:
        metadata[f"{architecture}.attention.value_length"] = key_length
    if architecture == "minimax-m2":
        metadata[f"{architecture}.expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "llama4":
        metadata["llama4.expert_feed_forward_length"] = config["intermediate_size"]
        metadata["llama4.feed_forward_length"] = config["intermediate_size_mlp"]
    if architecture == "hunyuan-moe":
        metadata["hunyuan-moe.expert_shared_feed_forward_length"] = config["intermediate_size"]
    if architecture in _SIGMOID:
        metadata[f"{architecture}.expert_gating_func"] = 2
    stored = _unfused(load_file(folder / "model.safetensors"), has_halves=architecture == "llama4")
    if architecture == "deepseek2":
        metadata |= {
            f"deepseek2.{key}": value for key, value in _latent_keys(config, name in _UNSPLIT).items()
        }
        stored = stored if name in _UNSPLIT else _absorbed(config, stored)
    tensors = _converted(architecture, config, stored)
    rope, factors = _rope(config)
    metadata |= {f"{architecture}.rope.{key}": value for key, value in rope.items()}
    for tensor, values in factors.items():
        tensors[tensor] = np.asarray(values, np.float32)
    return metadata, tensors


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Tensors,
    blocks: Mapping[str, tuple[Any, Any]] | None = None,
) -> Path:
    """A real file of it; `blocks` are the tensors that are stored quantised, with their type."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, values in tensors.items():
        raw, kind = (blocks or {}).get(name, (np.ascontiguousarray(values), None))
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_NORMAL, _CONTROL = 1, 3
_TWO_SPACES = "ĠĠ"  # a list of merges must not be empty


def save_tiny_text_gguf(folder: Path, name: str = "llama", checkpoint: Path | None = None) -> Path:
    """The tiny checkpoint, or another one, with a tokenizer of bytes, its matrices but routers in 8-bit blocks; the
    same in every run."""
    metadata, tensors = tiny_gguf(name, checkpoint or save_tiny_llama(folder / "checkpoint"))
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, _TWO_SPACES, "</s>"])
    writer.add_token_types([_NORMAL] * (len(letters) + 1) + [_CONTROL])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}")
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors.items():
        if values.ndim > 1 and "ffn_gate_inp" not in name:
            writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _unfused(stored: Tensors, has_halves: bool) -> Tensors:
    """Experts stacked per matrix, as GGUF wants them."""
    tensors: Tensors = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, values in stored.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
        elif name.endswith("input_linear.weight"):
            target = "experts" if "block_sparse_moe" in name else "shared_experts"
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
                tensors[re.sub(r"[^.]*\.input_linear", f"mlp.{target}.{part}_proj", name)] = half
        elif name.endswith("output_linear.weight"):
            target = "experts" if "block_sparse_moe" in name else "shared_experts"
            tensors[re.sub(r"[^.]*\.output_linear", f"mlp.{target}.down_proj", name)] = values
        elif name.endswith("experts.gate_up_proj") and has_halves:
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=2), strict=True):
                tensors[name.replace("gate_up_proj", f"{part}_proj.weight")] = half.swapaxes(1, 2)
        elif name.endswith("experts.gate_up_proj"):
            for part, offset in (("gate", 0), ("up", 1)):
                tensors[name.replace("gate_up_proj", f"{part}_proj.weight")] = values[
                    :, :, offset::2
                ].swapaxes(1, 2)
        elif name.endswith("experts.gate_up_proj_bias"):
            for part, offset in (("gate", 0), ("up", 1)):
                tensors[name.replace("gate_up_proj_bias", f"{part}_proj.bias")] = values[:, offset::2]
        elif name.endswith("experts.down_proj"):
            tensors[f"{name}.weight"] = values.swapaxes(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            tensors[name.replace("_bias", ".bias")] = values
        elif name.endswith("sinks"):
            tensors[f"{name}.weight"] = values
        else:
            tensors[name] = values
    for name, parts in experts.items():
        tensors[name] = np.stack([parts[i] for i in range(len(parts))])
    return tensors


def _converted(architecture: str, config: dict[str, Any], stored: Tensors) -> Tensors:
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors: Tensors = {}
    for name, values in stored.items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if architecture in _INTERLEAVED and ".q_proj" in name:
            values = _interleaved(values, config["num_attention_heads"])
        if architecture in _INTERLEAVED and ".k_proj" in name:
            values = _interleaved(values, config["num_key_value_heads"])
        if architecture.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if name.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction.bias")):
            values = values.squeeze()
        converted = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert converted is not None, name
        tensors[converted] = values
    return tensors


def _latent_keys(config: dict[str, Any], is_unsplit: bool) -> dict[str, Any]:
    rank, rotated, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
    key = config["qk_nope_head_dim"] + rotated
    keys = {"expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1}
    if is_unsplit:
        return keys | {"attention.key_length": key, "attention.value_length": value}
    return keys | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": value,
    }


def _absorbed(config: dict[str, Any], stored: Tensors) -> Tensors:
    """The map to keys and values as two, that of keys transposed."""
    tensors: Tensors = {}
    for name, values in stored.items():
        if not name.endswith("kv_b_proj.weight"):
            tensors[name] = values
            continue
        maps = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        plain = config["qk_nope_head_dim"]
        tensors[name.replace("kv_b_proj", "k_b_proj")] = maps[:, :plain].swapaxes(1, 2)
        tensors[name.replace("kv_b_proj", "v_b_proj")] = maps[:, plain:]
    return tensors


def _interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _rope(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Keys below `rope.`, and the tensors that carry factors."""
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if "full_attention" in rope:
        rope, local = rope["full_attention"], rope["sliding_attention"]
        assert local["rope_theta"] == 1e4
    keys: dict[str, Any] = {"freq_base": rope["rope_theta"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turning = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    keys["dimension_count"] = config.get("qk_rope_head_dim") or config.get("rotary_dim") or turning
    match rope["rope_type"]:
        case "dynamic":
            keys["freq_base"] *= rope["alpha"] ** (head_dim / (head_dim - 2))
        case "linear" | "yarn" as kind:
            keys |= {"scaling.type": kind, "scaling.factor": rope["factor"]}
            if kind == "yarn":
                keys["scaling.original_context_length"] = rope["original_max_position_embeddings"]
                if "mscale_all_dim" in rope:
                    keys["scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
        case "llama3":
            return keys, {"rope_freqs.weight": _llama3_factors(rope, head_dim)}
        case "longrope":
            original = config["original_max_position_embeddings"]
            stretch = config["max_position_embeddings"] / original
            keys["scaling.original_context_length"] = original
            keys["scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
            return keys, {
                "rope_factors_short.weight": rope["short_factor"],
                "rope_factors_long.weight": rope["long_factor"],
            }
    return keys, {}


def _llama3_factors(rope: dict[str, Any], dim: int) -> list[float]:
    factors = []
    context, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    for i in range(0, dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wave < context / high:
            factors.append(1.0)
        elif wave > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors
