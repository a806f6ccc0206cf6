"""Tiny checkpoints of families that only `transformers` runs: plain attention, and recurrent layers beside it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from support.models.tiny_checkpoint import VOCABULARY, save_tiny_llama

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "GPTNeoX": SIZES,
    "Bamba": {
        **SIZES,
        "attn_layer_indices": [1, 4],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}


def save_fallback(kind: str, folder: Path) -> Path:
    import torch
    import transformers

    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{kind}Config")(**KINDS[kind])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
        model.save_pretrained(folder, max_shard_size="200KB")
    text = save_tiny_llama(folder.parent / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(text / name, folder / name)
    return folder
