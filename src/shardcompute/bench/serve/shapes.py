"""Random checkpoints of known shapes: speed does not depend on what a model says, and nothing has to be fetched.

Weights are bfloat16, written tensor by tensor; with torch they are made on a CUDA device where there is one. The
tokenizer knows bytes, and makes up words for the rest of the vocabulary, so that every token can be decoded.
"""

from __future__ import annotations

import importlib.util
import json
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.core.errors import UsageError

_SPECIALS = ("<s>", "</s>")
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_NORM = ("input_layernorm", "post_attention_layernorm")
Tensors = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class RandomShape:
    """The widths of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int = 8192


SHAPES: Mapping[str, RandomShape] = {
    "8b": RandomShape(32, 4096, 14336, 32, 8, 128, 128_256),
    "3b": RandomShape(28, 3072, 8192, 24, 8, 128, 128_256),
    "1b": RandomShape(16, 2048, 8192, 32, 8, 64, 128_256),
    "100m": RandomShape(12, 768, 2048, 12, 4, 64, 32_000),
    "tiny": RandomShape(2, 64, 96, 4, 2, 16, 512),
}


def make_checkpoint(shape_name: str, folder: Path) -> Path:
    """The checkpoint of a shape, made in this folder unless it is there."""
    shape = SHAPES.get(shape_name)
    if shape is None:
        raise UsageError(f"there is no shape {shape_name!r}", hint=f"use one of {', '.join(SHAPES)}")
    target = folder / f"random-{shape_name}"
    if (target / "complete").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(_config(shape)), encoding="utf-8")
    (target / "tokenizer.json").write_text(_tokenizer(shape.vocab_size), encoding="utf-8")
    words = {"bos_token": _SPECIALS[0], "eos_token": _SPECIALS[1], "chat_template": _TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    _write_weights(shape, target / "model.safetensors")
    (target / "complete").touch()
    return target


def _config(shape: RandomShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


def _tokenizer(vocab_size: int) -> str:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Pipeline

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    # The specials follow the bytes; made-up words take what is left.
    for number in range(256 + len(_SPECIALS), vocab_size):
        vocabulary["Ġ" + _word(number)] = number
    pipeline = Pipeline(models.BPE(vocabulary | {text: 256 + i for i, text in enumerate(_SPECIALS)}, []))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(text, special=True) for text in _SPECIALS])
    told: str = pipeline.to_str()
    return told


def _word(number: int) -> str:
    letters = ""
    while number or len(letters) < 2:
        number, rest = divmod(number, 26)
        letters += string.ascii_lowercase[rest]
    return letters


def _tensors(shape: RandomShape) -> Tensors:
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, shape.hidden)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        for norm in _NORM:
            yield f"{layer}.{norm}.weight", (shape.hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (q_width, shape.hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv_width, shape.hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv_width, shape.hidden)
        yield f"{layer}.self_attn.o_proj.weight", (shape.hidden, q_width)
        yield f"{layer}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{layer}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{layer}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab_size, shape.hidden)


def _write_weights(shape: RandomShape, path: Path) -> None:
    header: dict[str, Any] = {}
    stop = 0
    for name, size in _tensors(shape):
        start, stop = stop, stop + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, stop]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    chance = _torch_chance() or _numpy_chance()
    with path.open("wb") as file:
        file.write(len(packed).to_bytes(8, "little"))
        file.write(packed)
        for name, size in _tensors(shape):
            gain = 1.0 if name.startswith("model.embed") else 1.5
            file.write(chance(size, gain))


def _torch_chance() -> Any:
    """What makes random tensors with torch, as bytes; None where there is none."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device)
    generator.manual_seed(1)

    def make(size: tuple[int, ...], gain: float) -> Any:
        if len(size) == 1:
            values = torch.ones(size, dtype=torch.bfloat16, device=device)
        else:
            values = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
            values *= gain * size[1] ** -0.5
        return memoryview(values.cpu().view(torch.uint8).numpy()).cast("B")

    return make


def _numpy_chance() -> Any:
    random = np.random.default_rng(1)

    def make(size: tuple[int, ...], gain: float) -> Any:
        if len(size) == 1:
            values = np.ones(size, dtype=np.float32)
        else:
            values = random.standard_normal(size, dtype=np.float32) * np.float32(gain * size[1] ** -0.5)
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

    return make
