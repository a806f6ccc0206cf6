"""A checkpoint small enough that a swarm of them fits a test: random Llama weights and a tokenizer of bytes.

Text is its UTF-8 bytes, so whatever the model says can be decoded, however wild it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

LAYERS = 6
HIDDEN = 64
CONTEXT = 512
_HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE = 4, 2, 16, 96
_SPECIALS = ("<s>", "</s>")
VOCABULARY = 256 + len(_SPECIALS)


def save_tiny_llama(
    folder: Path, *, seed: int = 1, layers: int = LAYERS, intermediate: int = _INTERMEDIATE
) -> Path:
    """The same in every run; a layer takes 768 bytes for each of `intermediate`. Its logits are around 2, so that
    sampling has a choice and greedy is not tied."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(_byte_pipeline().to_str())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    words = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    save_file(_weights(seed, layers, intermediate), folder / "model.safetensors")
    return folder


def _weights(seed: int, layers: int, intermediate: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.5) -> NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * gain * columns**-0.5).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return (1 + 0.3 * random.standard_normal(HIDDEN)).astype(np.float32)

    head = matrix(VOCABULARY, HIDDEN, 2.0)
    # Mostly readable: the first bytes of the vocabulary are the printable ones.
    head[94:] *= 0.5
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "lm_head.weight": head,
        "model.norm.weight": norm(),
    }
    for index in range(layers):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, _HEADS * _HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(intermediate, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(intermediate, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, intermediate),
        }
    return tensors


def _byte_pipeline() -> Pipeline:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pipeline = Pipeline(models.BPE(vocabulary, []))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(text, special=True) for text in _SPECIALS])
    return pipeline


def make_predictable(folder: Path) -> Path:
    """A checkpoint whose layers hardly matter: what it says next hangs on the last token, which can be learned."""
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.02
    save_file(tensors, folder / "model.safetensors")
    return folder
