"""GGUF files of architectures that only llama.cpp knows: what a chain is told of them, and who runs them."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families import from_foreign_gguf, from_gguf, is_foreign, refuse_foreign

METADATA = {
    "general.architecture": "starcoder2",
    "starcoder2.block_count": 2,
    "starcoder2.embedding_length": 64,
    "starcoder2.context_length": 512,
    "starcoder2.attention.head_count": 4,
    "starcoder2.attention.head_count_kv": [1, 2],
    "starcoder2.feed_forward_length": 128,
}
SHAPES = {
    "token_embd.weight": (100, 64),
    "output_norm.weight": (64,),
    "output_norm.bias": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.1.attn_q.weight": (64, 64),
    "blk.1.attn_q.bias": (64,),
}


def test_layers_are_told_by_their_tensors_and_sizes_by_their_keys() -> None:
    spec, layout = from_foreign_gguf(METADATA, SHAPES)
    assert (spec.layer_count, spec.hidden, spec.vocab_size, spec.context_length) == (2, 64, 100, 512)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 16)
    assert layout.model["head"].stored == "token_embd.weight"
    assert spec.tied_head
    assert [sorted(layer) for layer in layout.layers] == [["attn_q.weight"], ["attn_q.bias", "attn_q.weight"]]


def test_nothing_of_ours_runs_it() -> None:
    spec, _ = from_foreign_gguf(METADATA, SHAPES)
    assert is_foreign(spec)
    with pytest.raises(UnsupportedModelError, match="starcoder2") as caught:
        refuse_foreign(spec)
    assert "--backend llamacpp" in caught.value.hint


def test_a_file_that_lacks_layers_or_an_embedding_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layers"):
        from_foreign_gguf(METADATA | {"starcoder2.block_count": 3}, SHAPES)
    without = {name: shape for name, shape in SHAPES.items() if not name.startswith("token")}
    with pytest.raises(UnsupportedModelError, match="token_embd"):
        from_foreign_gguf(METADATA, without)
    with pytest.raises(CorruptModelError):
        from_foreign_gguf(METADATA | {"starcoder2.block_count": -1}, SHAPES)


def test_the_file_of_a_tower_says_what_to_serve_instead() -> None:
    metadata = {"general.architecture": "clip", "clip.has_vision_encoder": True}
    for read in (
        lambda: from_gguf(metadata, ["v.patch_embd.weight"]),
        lambda: from_foreign_gguf(metadata, {}),
    ):
        with pytest.raises(UnsupportedModelError, match="mmproj") as caught:
            read()
        assert "safetensors" in str(caught.value.hint)
