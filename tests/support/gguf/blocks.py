"""Random blocks of every GGUF type with sane scales, and tiny models made of them.

The `gguf` package writes few types; weights are random here anyway, so blocks are too, and only their scales are set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from shardcompute.backends.matrix import BlockMatrix
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS
from shardcompute.weights.formats.gguf_writer import (
    GgufTensor,
    stored_f32,
    stored_text,
    stored_u32,
    write_gguf,
)

Blocks = NDArray[np.uint8]
# Where each type keeps its float16 numbers; the others have one at their start.
HALVES: Mapping[str, Sequence[int]] = {
    "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108],
    "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [], "NVFP4": [], "IQ1_M": [],
}  # fmt: skip
LAYERS, HIDDEN, WIDE, HEADS, KV_HEADS = 6, 256, 256, 4, 2
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def with_scales(dtype: str, blocks: Blocks, scales: NDArray[np.float16]) -> Blocks:
    """The same blocks with `[n, 1]` as their scales and minima. MXFP4, NVFP4 and IQ1_M keep scales in ways of their
    own: exponents are drawn near one, and the four pieces of a float16 are put where they belong."""
    for at in HALVES.get(dtype, [0]):
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if dtype == "IQ1_M":
        words = blocks[:, 48:56].copy().view("<u2")
        nibbles = (scales.view("<u2") >> np.array([0, 4, 8, 12], np.uint16)) & np.uint16(0x0F)
        blocks[:, 48:56] = ((words & np.uint16(0x0FFF)) | (nibbles << np.uint16(12))).view(np.uint8)
    if dtype == "MXFP4":
        exponents = np.log2(np.maximum(np.abs(scales[:, 0].astype(np.float32)), 2.0**-20)).round()
        blocks[:, 0] = 128 + exponents
    return blocks


def random_blocks(dtype: str, count: int, seed: int = 0, scale: float = 0.05) -> Blocks:
    """Blocks whose scales are `scale` to twice that, up or down."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, BLOCK_LAYOUTS[dtype].file_bytes), dtype=np.uint8)
    signs = random.choice([-1, 1], (count, 1))
    return with_scales(dtype, blocks, (signs * random.uniform(scale, 2 * scale, (count, 1))).astype("<f2"))


def random_tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int, deviation: float) -> GgufTensor:
    """A tensor of blocks whose weights deviate so far from zero, nearly."""
    layout = BLOCK_LAYOUTS[dtype]
    count = int(np.prod(shape)) // layout.file_block
    codes, scales, shifts = layout.decode(random_blocks(dtype, 64, seed, 1.0))
    reach = float(BlockMatrix(layout.bits, layout.block_size, codes, scales, shifts).to_dense().std())
    blocks = random_blocks(dtype, count, seed, max(deviation / reach, 2.0**-14))
    if dtype == "NVFP4":
        blocks[:, :4] = 0x10 + blocks[:, :4] % 8  # e4m3 around 1/32
    return GgufTensor(name, dtype, shape, [blocks.tobytes()])


def save_block_gguf(path: Path, dtypes: Sequence[str], *, layers: int = LAYERS) -> Path:
    """A tiny Llama with a tokenizer of bytes, its matrices in these types by turns; the same in every run."""
    shapes = {"token_embd": (len(_LETTERS) + 2, HIDDEN), "output": (len(_LETTERS) + 2, HIDDEN)}
    norms = ["output_norm"]
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_v": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (WIDE, HIDDEN),
            f"blk.{layer}.ffn_up": (WIDE, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, WIDE),
        }
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    tensors = [
        random_tensor(f"{name}.weight", dtypes[index % len(dtypes)], shape, index, 1.5 * shape[1] ** -0.5)
        for index, (name, shape) in enumerate(shapes.items())
    ]
    random = np.random.default_rng(0)
    for name in norms:
        values = (1 + 0.3 * random.standard_normal(HIDDEN)).astype("<f4")
        tensors.append(GgufTensor(f"{name}.weight", "F32", (HIDDEN,), [values.tobytes()]))
    with path.open("wb") as file:
        write_gguf(file, _keys(layers), tensors)
    return path


def _keys(layers: int) -> dict[str, bytes]:
    numbers = {
        "block_count": layers,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    tokens = [*_LETTERS, "ĠĠ", "</s>"]
    types = [1] * (len(tokens) - 1) + [3]
    return {
        "general.architecture": stored_text("llama"),
        **{f"llama.{key}": stored_u32(value) for key, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": stored_f32(1e-5),
        "llama.rope.freq_base": stored_f32(10_000.0),
        "tokenizer.ggml.model": stored_text("gpt2"),
        "tokenizer.ggml.pre": stored_text("gpt-2"),
        "tokenizer.ggml.tokens": _stored_texts(tokens),
        "tokenizer.ggml.token_type": _array(5, len(types), np.array(types, "<i4").tobytes()),
        "tokenizer.ggml.merges": _stored_texts(["Ġ Ġ"]),
        "tokenizer.ggml.eos_token_id": stored_u32(len(tokens) - 1),
        "tokenizer.chat_template": stored_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        ),
    }


def _stored_texts(texts: Sequence[str]) -> bytes:
    return _array(8, len(texts), b"".join(stored_text(text)[4:] for text in texts))


def _array(code: int, count: int, values: bytes) -> bytes:
    return np.array([9, code], "<u4").tobytes() + np.array([count], "<u8").tobytes() + values
