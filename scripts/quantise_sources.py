"""Writes a dense model anew in the forms that quantisers publish, for `bench quality --sources`.

`python scripts/quantise_sources.py TARGET [MODEL]` makes a folder of each form below TARGET, and `dense`, what all were
made of. Weights are rounded to nearest, by each form's own definition; no data is looked at, as GPTQ and AWQ would.

A model from a file of 4-bit blocks lies on their grid, which blocks of 32 columns would find again. The columns of all
matrices are shuffled first, together with the rows that make them: the same function, and no grid.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import ModelSpec, whole
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.quantised.checkpoint import (
    FORMS,
    Form,
    awq,
    float8,
    four_bit_table,
    gptq,
    quantise_with,
    save_tensors,
    tensor,
)

_GROUP = 64
_SOURCES = {
    "fp8-blocks": Form(
        float8("weight_scale_inv", (64, 64)),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64], "activation_scheme": "dynamic"},
    ),
    "nf4": Form(
        four_bit_table("nf4", is_nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ),
    "mxfp4": FORMS["mxfp4-packed"],
    "nvfp4": FORMS["nvfp4"],
    "gptq4": Form(
        gptq(4, _GROUP),
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True},
    ),
    "awq": Form(
        awq(_GROUP),
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    ),
}
_NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_NORMS = {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}


def shuffled_tensors(checkpoint: Checkpoint) -> dict[str, Array]:
    """The weights of a plain Llama in float32 by Hugging Face's names, with shuffled columns."""
    spec, source = checkpoint.spec, checkpoint.source(whole(checkpoint.spec), form="float32")
    noise = np.random.default_rng(0)
    stream = noise.permutation(spec.hidden)
    found: dict[str, Array] = {
        "model.embed_tokens.weight": source.matrix("embedding").to_dense()[:, stream],
        "model.norm.weight": source.vector("norm")[stream],
    }
    for layer in range(spec.layer_count):
        matrices = {name: source.matrix(name, layer).to_dense() for name in _NAMES}
        inner = noise.permutation(spec.intermediate)
        values, queries = _value_order(spec, noise)
        for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            matrices[name] = matrices[name][:, stream]
        for name in ("mlp.gate", "mlp.up"):
            matrices[name] = matrices[name][inner]
        matrices["attention.v"] = matrices["attention.v"][values]
        matrices["attention.out"] = matrices["attention.out"][stream][:, queries]
        matrices["mlp.down"] = matrices["mlp.down"][stream][:, inner]
        for name, matrix in matrices.items():
            found[f"model.layers.{layer}.{_NAMES[name]}.weight"] = np.ascontiguousarray(matrix)
        for name, stored in _NORMS.items():
            found[f"model.layers.{layer}.{stored}.weight"] = source.vector(name, layer)[stream]
    return found


def _value_order(spec: ModelSpec, noise: np.random.Generator) -> tuple[Array, Array]:
    """Rows of v, and with them columns of what follows, in another order within each head."""
    heads = [noise.permutation(spec.head_dim) + head * spec.head_dim for head in range(spec.kv_heads)]
    each = spec.heads // spec.kv_heads
    columns = [heads[head // each] % spec.head_dim + head * spec.head_dim for head in range(spec.heads)]
    return np.concatenate(heads), np.concatenate(columns)


def config_of(spec: ModelSpec, theta: float) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layer_count,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a dense model anew in the forms that quantisers publish."
    )
    parser.add_argument("target", type=Path, help="the folder that gets a folder of each form")
    parser.add_argument(
        "model", nargs="?", default="", help="a GGUF model of Llama's kind; nothing for the default"
    )
    options = parser.parse_args()
    target: Path = options.target
    files = resolve(parse_reference(options.model), load_settings())
    with open_checkpoint(files) as checkpoint:
        theta = float(checkpoint.tensors.metadata["llama.rope.freq_base"])
        config = config_of(checkpoint.spec, theta)
        tensors: dict[str, Float32] = shuffled_tensors(checkpoint)
    assert files.folder is not None
    _save_tokenizer(files.folder, files.main_file, target / "tokenizer")
    dense = {name: tensor(values) for name, values in tensors.items()}
    _write(target, "dense", dense, config)
    for name, form in _SOURCES.items():
        stored, _ = quantise_with(form, tensors)
        _write(target, name, stored, {**config, "quantization_config": form.config})
        print(name)


def _save_tokenizer(folder: Path, file: str, target: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)


def _write(target: Path, name: str, tensors: dict[str, tuple[str, Array]], config: object) -> None:
    folder = target / name
    folder.mkdir(parents=True)
    save_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((target / "tokenizer" / file).read_bytes())


if __name__ == "__main__":
    main()
