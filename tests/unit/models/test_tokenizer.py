"""One tokenizer for Hugging Face folders and GGUF files, exact to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Pipeline

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError, UsageError
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.service import TextCodec

CORPUS = [
    "Hello there, hello world. It's 2024!",
    "naïve café, 漢字 and 😀 here",
    "def f(x):\n    return x",
] * 2
SPECIALS = ["<s>", "</s>", "<|im_end|>"]
USER = [{"role": "user", "content": "Hello"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def byte_level(*, adds_bos: bool = False) -> Pipeline:
    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        pipeline.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return pipeline


def sentencepiece() -> Pipeline:
    vocab = {
        token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])
    }
    for piece in ("▁", "H", "i", "Hi", "▁Hi"):
        vocab[piece] = len(vocab)
    merges = [("H", "i"), ("▁", "Hi")]
    pipeline = Pipeline(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pipeline.decoder = decoders.Sequence(steps)
    pipeline.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return pipeline


def gguf(**keys: Any) -> dict[str, Any]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<think>"]
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [1] * 256 + [3, 3, 4],
        "merges": [],
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def from_hf(
    pipeline: Pipeline | None = None, config: dict[str, Any] | None = None, **options: Any
) -> Tokenizer:
    return Tokenizer.from_hf((pipeline or byte_level()).to_str(), config, **options)


def test_it_is_what_the_api_asks_for() -> None:
    codec: TextCodec = from_hf()
    assert codec.decode(codec.encode("Hello")) == "Hello"


@pytest.mark.parametrize(
    "text", [*CORPUS, "", " ", "\x00", "a\r\n\t b", "\ufffd\ufeff", "👨‍👩‍👧‍👦", "\U0010ffff"]
)
def test_byte_level_text_comes_back(text: str) -> None:
    for tokenizer in (from_hf(), Tokenizer.from_gguf(gguf())):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_ids_are_those_of_the_file() -> None:
    pipeline = byte_level()
    assert from_hf(pipeline).encode(CORPUS[0]) == pipeline.encode(CORPUS[0]).ids


def test_every_single_byte_has_its_token() -> None:
    tokenizer = from_hf()
    spelled = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= spelled


def test_sentencepiece_tokens_stand_for_their_bytes() -> None:
    tokenizer = from_hf(sentencepiece())
    ids = tokenizer.encode("Hi Hi é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" Hi", b" Hi", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == " Hi Hi é"
    assert tokenizer.decode([1, *ids], skip_special=False) == "<s> Hi Hi é"


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_added_tokens_stand_for_their_own_text(build: Callable[[], Pipeline]) -> None:
    pipeline = build()
    # Each would mean something else as an ordinary token.
    pipeline.add_tokens([AddedToken(text, normalized=False) for text in ("é", "▁▁", "<0x4A>x")])
    tokenizer = from_hf(pipeline)
    ids = tokenizer.encode("é▁▁<0x4A>x")
    assert [tokenizer.token_bytes(i) for i in ids] == ["é".encode(), "▁▁".encode(), b"<0x4A>x"]


def test_user_defined_tokens_are_text_and_control_tokens_are_not() -> None:
    tokenizer = Tokenizer.from_gguf(gguf())
    assert tokenizer.token_bytes(258) == b"<think>"
    assert tokenizer.decode([256, 258, 257]) == "<think>"


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    tokenizer = from_hf()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(10**9) == b""
    with pytest.raises(UsageError, match="-1"):
        tokenizer.decode([-1])


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    pipeline = byte_level()
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=64)
    text = "Hello world, and then some more text than four tokens"
    assert from_hf(pipeline).encode(text) == byte_level().encode(text).ids


def test_special_tokens_are_added_as_the_file_says() -> None:
    tokenizer = from_hf(byte_level(adds_bos=True))
    plain = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.encode("Hello") == [0, *plain, 1]
    assert tokenizer.encode("") == [0, 1]
    assert tokenizer.bos_id == 0


@pytest.mark.parametrize(
    ("config", "frame"),
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, ([0], [])),
        ({"add_bos_token": False, "bos_token": "<s>"}, ([], [])),
        ({"add_eos_token": True, "eos_token": {"content": "</s>"}}, ([], [1])),
        ({"add_bos_token": True}, ([], [])),
        ({"bos_token": "<s>"}, ([0], [1])),
    ],
)
def test_the_config_overrides_what_tokenizer_json_adds(
    config: dict[str, Any], frame: tuple[Any, Any]
) -> None:
    tokenizer = from_hf(byte_level(adds_bos=True), config)
    before, after = frame
    assert tokenizer.encode("Hello") == [*before, *tokenizer.encode("Hello", add_special=False), *after]


@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [256], []),
        ({"add_bos_token": True, "add_eos_token": True}, [256], [257]),
    ],
)
def test_gguf_says_what_to_add(keys: dict[str, bool], before: list[int], after: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(gguf(**keys))
    assert tokenizer.encode("A") == [*before, *tokenizer.encode("A", add_special=False), *after]


def test_every_way_to_end_an_answer_is_known() -> None:
    tokenizer = from_hf(
        config={"eos_token": "</s>"}, generation_config={"eos_token_id": [1, 300]}, model_eos=301
    )
    assert tokenizer.eos_ids == {1, 300, 301, 2}
    assert tokenizer.special_ids == {0, 1, 2, 300, 301}
    assert from_hf(special_tokens_map={"eos_token": "</s>"}).eos_ids == {1, 2}
    assert from_hf(model_eos=[5, True]).eos_ids == {5, 2}


def test_a_turn_end_counts_only_when_it_is_special() -> None:
    tokens = [*gguf()["tokenizer.ggml.tokens"], "<|im_end|>"]
    for kind, expected in ((3, {257, 259}), (4, {257})):
        metadata = gguf(tokens=tokens, token_type=[1] * 256 + [3, 3, 4, kind])
        assert Tokenizer.from_gguf(metadata).eos_ids == expected


def test_end_separates_parts_where_return_and_call_end_answers() -> None:
    pipeline = byte_level()
    pipeline.add_special_tokens(["<|end|>"])
    assert pipeline.token_to_id("<|end|>") in from_hf(pipeline).eos_ids
    pipeline.add_special_tokens(["<|return|>", "<|call|>"])
    tokenizer = from_hf(pipeline)
    assert pipeline.token_to_id("<|end|>") not in tokenizer.eos_ids
    assert {pipeline.token_to_id("<|return|>"), pipeline.token_to_id("<|call|>")} <= tokenizer.eos_ids


@pytest.mark.parametrize("text", ["\ud800", "ok then \udfff", "\ud83d \ude00"])
def test_lone_surrogates_are_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="lone surrogate") as caught:
        from_hf().encode(text)
    assert caught.value.hint


def test_a_very_long_text_is_encoded() -> None:
    tokenizer = from_hf()
    for text in ("Hello world " * 20_000, "a" * 200_000, "\n" * 200_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("damage", ["", "{}", "null", "[" * 10_000, '{"model": 1}', "half"])
def test_a_damaged_file_is_corrupt(damage: str) -> None:
    text = byte_level().to_str()
    with pytest.raises(CorruptModelError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_hf(text[: len(text) // 2] if damage == "half" else damage)
    assert caught.value.hint


def test_a_frame_of_unknown_tokens_is_corrupt() -> None:
    described = json.loads(byte_level(adds_bos=True).to_str())
    described["post_processor"]["special_tokens"] = {}
    with pytest.raises(CorruptModelError, match="cannot be encoded"):
        Tokenizer.from_hf(json.dumps(described))


def test_an_unknown_token_that_is_no_token_is_corrupt() -> None:
    pipeline = Pipeline(models.BPE({"a": 0}, [], unk_token="missing"))
    pipeline.decoder = decoders.ByteFallback()
    tokenizer = from_hf(pipeline)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(CorruptModelError, match="missing"):
        tokenizer.encode("b")


def test_prefixed_parts_of_words_are_unsupported() -> None:
    described = json.loads(byte_level().to_str())
    described["model"]["continuing_subword_prefix"] = "#"
    with pytest.raises(UnsupportedModelError, match="prefix"):
        Tokenizer.from_hf(json.dumps(described))


def test_tokens_without_exact_bytes_are_unsupported() -> None:
    pipeline = Pipeline(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UnsupportedModelError, match="neither byte-level nor SentencePiece: Whitespace"):
        from_hf(pipeline)


def test_chats_are_rendered_and_encoded() -> None:
    config = {"chat_template": TEMPLATE, "eos_token": "</s>"}
    tokenizer = from_hf(config=config)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(USER) == "user: Hello</s>"
    assert tokenizer.encode_chat(USER) == tokenizer.encode("user: Hello</s>", add_special=False)
    assert tokenizer.encode_chat(USER)[-1] == 1


def test_a_template_file_wins_over_the_config() -> None:
    tokenizer = from_hf(config={"chat_template": "old"}, chat_template="new{{ flag }}")
    assert tokenizer.render_chat(USER, variables={"flag": 1}) == "new1"


def test_a_template_for_tools_is_used_for_tools() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    metadata = gguf() | {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    for tokenizer in (from_hf(config={"chat_template": named}), Tokenizer.from_gguf(metadata)):
        assert tokenizer.render_chat(USER) == "plain"
        assert tokenizer.render_chat(USER, tools=[{"name": "f"}]) == "tools"


@pytest.mark.parametrize("template", ["{{ bos_token }}Hello", "Hello"])
def test_a_chat_begins_with_bos_exactly_once_and_is_left_open(template: str) -> None:
    config = {"chat_template": template, "bos_token": "<s>"}
    tokenizer = from_hf(byte_level(adds_bos=True), config)
    assert tokenizer.encode_chat(USER) == [0, *tokenizer.encode("Hello", add_special=False)]


def test_a_chat_gets_no_bos_where_texts_get_none() -> None:
    tokenizer = from_hf(config={"chat_template": "Hello", "bos_token": "<s>"})
    assert tokenizer.encode_chat(USER) == tokenizer.encode("Hello")


def test_gguf_names_its_tokens_for_the_template() -> None:
    metadata = gguf(unknown_token_id=258) | {
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}"
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode_chat(USER) == [256, 257, 258]
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (256, 259)


def test_a_model_without_template_points_to_raw_prompts() -> None:
    tokenizer = from_hf()
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match="no chat template") as caught:
        tokenizer.encode_chat(USER)
    assert "raw prompt" in caught.value.hint


def test_a_broken_template_leaves_raw_prompts_alone() -> None:
    tokenizer = from_hf(config={"chat_template": "{% broken"})
    assert tokenizer.encode("Hello")
    with pytest.raises(UnsupportedModelError, match="does not compile"):
        tokenizer.render_chat(USER)


def test_a_vocabulary_with_gaps_has_room_for_its_highest_id() -> None:
    described = json.loads(byte_level().to_str())
    described["model"]["vocab"]["gap"] = 1_000_000
    tokenizer = Tokenizer.from_hf(json.dumps(described))
    assert tokenizer.vocab_size == 1_000_001
    assert tokenizer.token_bytes(999_999) == b""
    assert tokenizer.token_bytes(1_000_000) == b"gap"
