"""Our reading of a GGUF vocabulary against that of `transformers`, on a real model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from shardcompute.models.gguf_vocabulary import read_gguf_vocabulary
from shardcompute.models.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello world",
    "  leading and trailing  ",
    "a\n\n\nb\t\tc\r\nd   e    f",
    "año, Ünïcödé, ﬁne, e\u0301",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 ok 🤷🏽‍♀️",
    "def f(x: int) -> int:\n    if x > 10:\n        return x ** 2  # squared\n\treturn 0\n",
    "1234567890 12.5e-3 2024-11-15 0x7F 3,141,592",
    "x  42\n   7\n\n\n33.",
    "漢字かな交じり文、한국어 문장. ภาษาไทย עברית العربية हिन्दी",
    "Ⅳ Ⅻ ²³ ½ ٣٤",
    "I'll don't WE'RE they'd 'tis o'clock",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><not_a_token><file_sep>",
    "\x00\x01\x7f\u200b\u00a0\u3000\ufeff",
    "https://example.org/a?b=c&d=%20#frag",
    "{}[]()<>!?.,;:'\"`~@#$%^&*-_=+|\\/",
    "",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
    [
        {"role": "user", "content": "Name a fruit 🍎"},
        {"role": "assistant", "content": "Apple"},
        {"role": "user", "content": "Another"},
    ],
]


def mixed_texts(count: int) -> list[str]:
    """Texts with pieces of all the others in random order."""
    source = random.Random(7)
    pieces = [piece for text in TEXTS for piece in (text, *text.split(" "), " ", "  ", "\n", "12")]
    return ["".join(source.choices(pieces, k=8)) for _ in range(count)]


@pytest.fixture(scope="module")
def metadata(smollm2_gguf: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(smollm2_gguf).fields.items()}


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    # Its GGUF reader does not cut digits apart for SmolLM2; these are the steps of its tokenizer.json.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def test_ids_are_those_of_transformers(metadata: dict[str, Any], reference: Any) -> None:
    ours = Tokenizer.from_gguf(metadata)
    for text in [*TEXTS, *mixed_texts(200)]:
        ids = ours.encode(text)
        assert ids == reference.encode(text), text
        assert ours.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_chats_are_those_of_transformers(metadata: dict[str, Any], reference: Any) -> None:
    ours = Tokenizer.from_gguf(metadata)
    for chat in CHATS:
        for prompts in (True, False):
            options: dict[str, Any] = {"add_generation_prompt": prompts}
            rendered = reference.apply_chat_template(chat, tokenize=False, **options)
            assert ours.render_chat(chat, **options) == rendered
            assert ours.encode_chat(chat, **options) == reference.encode(rendered, add_special_tokens=False)


def test_every_token_is_spelled_as_transformers_does(metadata: dict[str, Any], reference: Any) -> None:
    ours = Tokenizer.from_gguf(metadata)
    assert ours.vocab_size == len(reference)
    for token_id in range(0, ours.vocab_size, 7):
        assert ours.token_bytes(token_id).decode(errors="replace") == reference.decode([token_id])


def test_answers_end_where_the_model_ends_them(metadata: dict[str, Any], reference: Any) -> None:
    ours = Tokenizer.from_gguf(metadata)
    assert reference.eos_token_id in ours.eos_ids
    assert ours.bos_id == reference.bos_token_id
    added = reference.added_tokens_decoder.items()
    assert ours.special_ids == {token_id for token_id, token in added if token.special}


def test_cuts_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    known = 0
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for name in ("llama-bpe", "llama3", "dbrx", "tekken", "qwen2", "deepseek-r1-qwen", "qwen35", "gpt-4o"):
        keys = {"model": "gpt2", "pre": name, "tokens": alphabet, "merges": []}
        pipeline = read_gguf_vocabulary(
            {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        ).pipeline
        theirs = pre_tokenizers.Split(Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
        assert pipeline.pre_tokenizer is not None
        for text in TEXTS:
            ours = [span for _, span in pipeline.pre_tokenizer.pre_tokenize_str(text)]
            assert ours == [span for _, span in theirs.pre_tokenize_str(text)], (name, text)
            known += 1
    assert known == 8 * len(TEXTS)
