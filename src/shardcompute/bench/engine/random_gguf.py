"""GGUF models of random weights, for what depends on shapes and number types alone: speed and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.core.errors import UsageError
from shardcompute.weights.formats.gguf_writer import (
    GgufTensor,
    stored_f32,
    stored_text,
    stored_u32,
    write_gguf,
)

# Where the float16 numbers of a block stand, its elements and bytes, how many times the first number a weight's random
# bytes spread over, and the second number by the first.
_BLOCKS = {
    "Q4_0": ((0,), 32, 18, 16 / 3.46, 0.0),  # a uniform code spreads over 0.29 of its range
    "Q4_1": ((0, 2), 32, 20, 16 / 3.46, -7.5),
    "Q8_0": ((0,), 32, 34, 256 / 3.46, 0.0),
    "IQ4_NL": ((0,), 32, 18, 16 / 3.46, 0.0),
    "Q4_K": ((0, 2), 256, 144, 280.0, 7.5),
    "Q6_K": ((208,), 256, 210, 1365.0, 0.0),
}
_FLOATS = {"F32": np.float32, "F16": np.float16}
_PIECE_ROWS = 1024


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A model of the Llama family."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab_size: int
    context_length: int = 2048
    has_head: bool = True
    architecture: str = "llama"
    head_size: int = 0
    """0: hidden / heads."""
    experts: int = 0
    """In every layer, each of width `intermediate`; 0: a plain block."""
    per_token: int = 0
    model_layers: int = 0
    """Of the model that the layers are taken from; 0: as many."""

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads


SHAPES = {
    "default": LlamaShape(30, 576, 1536, 9, 3, 49_152, has_head=False),
    "1.1b": LlamaShape(22, 2048, 5632, 32, 4, 32_000),
    "qwen3-moe": LlamaShape(
        2,
        2048,
        768,
        32,
        4,
        32_000,
        architecture="qwen3moe",
        head_size=128,
        experts=128,
        per_token=8,
        model_layers=48,
    ),
    "mixtral": LlamaShape(1, 4096, 14_336, 32, 8, 32_000, experts=8, per_token=2, model_layers=32),
}
"""The default model's shape, one of 1.1 billion weights, and layers as Qwen3-30B-A3B and Mixtral 8x7B have them (few of
them, and a smaller vocabulary)."""


def named_shape(name: str) -> LlamaShape:
    if name not in SHAPES:
        raise UsageError(f"there is no shape {name!r}", hint=f"use one of {', '.join(SHAPES)}")
    return SHAPES[name]


def transformers_config(shape: LlamaShape) -> dict[str, Any]:
    """The same shape as the config of a class that `transformers` has."""
    fields: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "tie_word_embeddings": not shape.has_head,
    }
    if shape.experts and shape.architecture == "qwen3moe":
        fields |= {
            "model_type": "qwen3_moe",
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.intermediate,
        }
    elif shape.experts:
        fields |= {"model_type": "mixtral", "num_local_experts": shape.experts}
    return fields | ({"num_experts_per_tok": shape.per_token} if shape.experts else {})


def write_random_gguf(
    path: Path, shape: LlamaShape, dtype: str, *, seed: int = 0, architecture: str = ""
) -> Path:
    """A file of these shapes whose matrices are of this type; `architecture` is any with the shape's tensors."""
    architecture = architecture or shape.architecture
    if dtype not in _BLOCKS and dtype not in _FLOATS:
        raise UsageError(f"there is no random {dtype}", hint=f"use one of {', '.join((*_BLOCKS, *_FLOATS))}")
    noise = np.random.default_rng(seed)
    head_dim = shape.head_dim
    matrices = {
        "attn_q": (shape.heads * head_dim, shape.hidden),
        "attn_k": (shape.kv_heads * head_dim, shape.hidden),
        "attn_v": (shape.kv_heads * head_dim, shape.hidden),
        "attn_output": (shape.hidden, shape.heads * head_dim),
    }
    sizes = {
        "ffn_gate": (shape.intermediate, shape.hidden),
        "ffn_up": (shape.intermediate, shape.hidden),
        "ffn_down": (shape.hidden, shape.intermediate),
    }
    stacked = {f"{name}_exps": size for name, size in sizes.items()} if shape.experts else {}
    matrices |= {} if shape.experts else sizes
    norms = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
    if architecture == "qwen3moe":
        norms |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim}
    ones = np.ones(shape.hidden, np.float32).tobytes()
    tensors = [_matrix("token_embd.weight", dtype, (shape.vocab_size, shape.hidden), noise)]
    tensors.append(GgufTensor("output_norm.weight", "F32", (shape.hidden,), [ones]))
    if shape.has_head:
        tensors.append(_matrix("output.weight", dtype, (shape.vocab_size, shape.hidden), noise))
    for layer in range(shape.layers):
        tensors += [
            GgufTensor(f"blk.{layer}.{name}.weight", "F32", (width,), [ones[: 4 * width]])
            for name, width in norms.items()
        ]
        if shape.experts:
            tensors.append(
                _matrix(f"blk.{layer}.ffn_gate_inp.weight", "F32", (shape.experts, shape.hidden), noise)
            )
        for name, (rows, columns) in stacked.items():
            flat = (shape.experts * rows, columns)
            pieces = _pieces(dtype, flat, noise)
            tensors.append(
                GgufTensor(f"blk.{layer}.{name}.weight", dtype, (shape.experts, rows, columns), pieces)
            )
        tensors += [
            _matrix(f"blk.{layer}.{name}.weight", dtype, size, noise) for name, size in matrices.items()
        ]
    with path.open("wb") as file:
        write_gguf(file, _values(shape, head_dim, architecture), tensors)
    return path


def _values(shape: LlamaShape, head_dim: int, architecture: str) -> dict[str, bytes]:
    numbers = {
        "block_count": shape.layers,
        "context_length": shape.context_length,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "rope.dimension_count": head_dim,
        "vocab_size": shape.vocab_size,
    }
    if shape.experts:
        numbers |= {"expert_count": shape.experts, "expert_used_count": shape.per_token}
        numbers["expert_feed_forward_length"] = shape.intermediate
    if shape.head_size:
        numbers |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return {
        "general.architecture": stored_text(architecture),
        **{f"{architecture}.{key}": stored_u32(number) for key, number in numbers.items()},
        f"{architecture}.attention.layer_norm_rms_epsilon": stored_f32(1e-5),
        f"{architecture}.rope.freq_base": stored_f32(1e4),
        "tokenizer.ggml.model": stored_text("no_vocab"),
    }


def _matrix(name: str, dtype: str, shape: tuple[int, int], noise: np.random.Generator) -> GgufTensor:
    return GgufTensor(name, dtype, shape, _pieces(dtype, shape, noise))


def _pieces(dtype: str, shape: tuple[int, int], noise: np.random.Generator) -> Iterator[bytes]:
    """Weights of about the size that keeps activations as they are, some rows at a time."""
    spread = shape[1] ** -0.5
    for first in range(0, shape[0], _PIECE_ROWS):
        rows = min(_PIECE_ROWS, shape[0] - first)
        if dtype in _FLOATS:
            values = noise.standard_normal((rows, shape[1]), dtype=np.float32) * np.float32(spread)
            yield values.astype(_FLOATS[dtype]).tobytes()
            continue
        places, elements, size, range_, second = _BLOCKS[dtype]
        blocks = noise.integers(0, 256, (rows * shape[1] // elements, size), dtype=np.uint8)
        scale = np.float16(spread / range_)
        for place, value in zip(places, (scale, np.float16(second * float(scale))), strict=False):
            blocks[:, place : place + 2] = np.frombuffer(value.tobytes(), np.uint8)
        yield blocks.tobytes()
