"""A tokenizer that travelled is the tokenizer that was packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.core.errors import CorruptModelError
from shardcompute.core.settings import load_settings
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.weights.tokenizer_pack import pack_tokenizer, unpack_tokenizer
from support.models.tiny_checkpoint import save_tiny_llama

TEXT = "Grüße, 世界! def f(x):\n    return x  # <|im_start|>"
CHAT = [{"role": "user", "content": TEXT}]


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(resolve(parse_reference(str(path)), load_settings()))


def assert_same(one: Tokenizer, other: Tokenizer) -> None:
    assert one.encode(TEXT) == other.encode(TEXT)
    assert (one.eos_ids, one.bos_id, one.special_ids) == (other.eos_ids, other.bos_id, other.special_ids)
    assert one.vocab_size == other.vocab_size
    assert one.has_chat_template == other.has_chat_template


def test_of_a_folder(tmp_path: Path) -> None:
    with opened(save_tiny_llama(tmp_path / "tiny")) as checkpoint:
        assert_same(unpack_tokenizer(pack_tokenizer(checkpoint)), checkpoint.tokenizer())


def test_of_a_gguf_file(smollm2_gguf: Path) -> None:
    with opened(smollm2_gguf) as checkpoint:
        there, here = unpack_tokenizer(pack_tokenizer(checkpoint)), checkpoint.tokenizer()
    assert_same(there, here)
    assert there.encode_chat(CHAT) == here.encode_chat(CHAT)


@pytest.mark.parametrize("content", [b"", b"x", b"x\x9cK\x04\x00\x00b\x00b"])
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(CorruptModelError, match="tokenizer cannot be read"):
        unpack_tokenizer(content)
