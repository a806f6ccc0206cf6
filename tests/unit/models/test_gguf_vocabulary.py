"""GGUF vocabularies become pipelines that cut and merge as the format means them to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer as Pipeline
from tokenizers import models, normalizers, pre_tokenizers, trainers

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.gguf_vocabulary import Spelling, read_gguf_vocabulary

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(
    *, merges: tuple[str, ...] = (), extra: tuple[tuple[str, int], ...] = (), **keys: Any
) -> dict[str, Any]:
    tokens = ALPHABET + [merge.replace(" ", "") for merge in merges] + [text for text, _ in extra]
    types = [1] * (len(tokens) - len(extra)) + [kind for _, kind in extra]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": list(merges),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def sentencepiece(
    pieces: list[str], *, extra: tuple[tuple[str, int], ...] = (), name: str = "", **keys: Any
) -> dict[str, Any]:
    """The usual layout: reserved tokens, the bytes, then `pieces` from the best score down."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0] * len(extra)
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [kind for _, kind in extra]
    tokens += [text for text, _ in extra]
    metadata = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()} | {
        "general.name": name
    }


def tokens_of(metadata: dict[str, Any], text: str) -> list[str]:
    return read_gguf_vocabulary(metadata).pipeline.encode(text).tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", "!?", "\n ", " ok"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "!?", "\n ", " ok"]),
        ("starcoder", ["It", "'s", " ", "1", "2", "3", "4", "5", "!?", "\n ", " ok"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "!?\n", " ", " ok"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "!?\n", " ", " ok"]),
        ("gpt-4o", ["It's", " ", "123", "45", "!?\n", " ", " ok"]),
        ("deepseek-v3", ["It", "'s", " ", "123", "45", "!?\n", " ", " ok"]),
        ("deepseek-coder", ["It", "'", "s", " ", "1", "2", "3", "4", "5", "!?", "\n", " ", " ok"]),
        ("default", ["It", "'", "s", " ", "123", "45", "!?", "\n ", " ok"]),
        (None, ["It", "'", "s", " ", "123", "45", "!?", "\n ", " ok"]),
    ],
)
def test_text_is_cut_the_way_that_pre_names(pre: str | None, expected: list[str]) -> None:
    text = "It's 12345!?\n  ok"
    pipeline = read_gguf_vocabulary(byte_level(pre=pre)).pipeline
    assert pipeline.pre_tokenizer is not None
    cuts = pipeline.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in cuts] == expected


def test_tekken_cuts_where_capitals_begin_a_word() -> None:
    pipeline = read_gguf_vocabulary(byte_level(pre="tekken")).pipeline
    assert pipeline.pre_tokenizer is not None
    cuts = pipeline.pre_tokenizer.pre_tokenize_str("camelCase")
    assert [piece for piece, _ in cuts] == ["camel", "Case"]


def test_merges_apply_in_their_order() -> None:
    assert tokens_of(byte_level(merges=("a b", "b c", "ab c")), "abc") == ["abc"]
    assert tokens_of(byte_level(merges=("b c", "a b", "ab c")), "abc") == ["a", "bc"]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["hey"]), ("gpt-2", ["h", "e", "y"])])
def test_some_families_take_a_known_word_without_merging(pre: str, expected: list[str]) -> None:
    assert tokens_of(byte_level(pre=pre, extra=(("hey", 1),)), "hey") == expected


@pytest.mark.parametrize(("pre", "count"), [("qwen2", 2), ("gpt-2", 3)])
def test_some_families_compose_characters_first(pre: str, count: int) -> None:
    assert len(tokens_of(byte_level(pre=pre), "e\u0301")) == count


def test_control_and_user_defined_tokens_match_whole() -> None:
    metadata = byte_level(pre="smollm", extra=(("<|x1|>", 3), ("<2nd>", 4)), bos_token_id=256)
    vocabulary = read_gguf_vocabulary(metadata)
    assert vocabulary.pipeline.encode("a<|x1|><2nd>b").ids[1:-1] == [256, 257]
    assert vocabulary.special_ids == {256}
    assert vocabulary.spelling is Spelling.BYTE_LEVEL
    assert vocabulary.size == 258


def test_named_ids_are_special_even_when_no_types_are_given() -> None:
    metadata = byte_level(extra=(("<end>", 1),), token_type=None, eos_token_id=256)
    vocabulary = read_gguf_vocabulary(metadata)
    assert vocabulary.eos_ids == vocabulary.special_ids == {256}
    assert vocabulary.pipeline.encode("<end>").ids == [256]


@pytest.mark.parametrize(
    ("metadata", "add_bos"),
    [
        (byte_level(extra=(("<b>", 3),), bos_token_id=256), False),
        (byte_level(extra=(("<b>", 3),), bos_token_id=256, pre="llama-bpe"), True),
        (byte_level(extra=(("<b>", 3),), bos_token_id=256, add_bos_token=True), True),
        (byte_level(add_bos_token=True), False),
        (sentencepiece(["a"]), True),
        (sentencepiece(["a"], add_bos_token=False), False),
    ],
)
def test_bos_is_added_where_the_file_or_its_family_says_so(metadata: dict[str, Any], add_bos: bool) -> None:
    assert read_gguf_vocabulary(metadata).add_bos is add_bos


def test_sentencepiece_ids_have_their_usual_places() -> None:
    vocabulary = read_gguf_vocabulary(sentencepiece(["a"]))
    assert (vocabulary.bos_id, vocabulary.eos_ids) == (1, {2})
    assert vocabulary.special_ids == {0, 1, 2}


def test_sentencepiece_marks_spaces_and_falls_back_to_bytes() -> None:
    metadata = sentencepiece(["▁a", "▁", "a"])
    assert tokens_of(metadata, "a aé") == ["▁a", "▁a", "<0xC3>", "<0xA9>"]
    assert tokens_of(metadata, " a") == ["▁", "▁a"]
    assert tokens_of(metadata | {"tokenizer.ggml.add_space_prefix": False}, "a a") == ["a", "▁a"]


def test_sentencepiece_does_not_merge_into_reserved_tokens() -> None:
    metadata = sentencepiece(["<", "0", "x", "4", "1", ">", "<0", "x4", "1>", "<0x4"], add_space_prefix=False)
    assert tokens_of(metadata, "<0x41>") == ["<0x4", "1>"]


def test_sentencepiece_user_defined_runs_of_spaces_match_longest_first() -> None:
    for spelling in ("▁", " "):
        metadata = sentencepiece(
            ["▁", "a"], extra=((spelling * 2, 4), (spelling * 3, 4)), add_space_prefix=False
        )
        assert read_gguf_vocabulary(metadata).pipeline.encode("a   a").ids == [260, 262, 260]


def test_phi_3_swallows_blanks_after_control_tokens() -> None:
    for name, expected in (("Phi-3 Mini", [261, 260]), ("Other", [261, 13, 260])):
        metadata = sentencepiece(["▁", "a"], extra=(("<|user|>", 3),), name=name, add_space_prefix=False)
        assert read_gguf_vocabulary(metadata).pipeline.encode("<|user|>\na").ids == expected


def test_sentencepiece_merges_as_sentencepiece_does() -> None:
    corpus = ["the cat sat on the mat", "that hat, those other hats", "aaaa bbbb ==== ----"] * 3
    trained = Pipeline(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    by_rank = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    pieces = sorted((piece for piece, _ in by_rank), key=lambda piece: len(piece) == 1)
    metadata = sentencepiece(pieces, add_space_prefix=False)
    for text in (
        *corpus,
        "that tha thaaaat",
        "the other -- mat==hat",
        "ttthhheee   ccc",
        "a b",
        "=-=-=-==--",
    ):
        marked = text.replace(" ", "▁")
        expected = merge_by_score(marked, {piece: -rank for rank, piece in enumerate(pieces)})
        assert tokens_of(metadata, text) == expected


def merge_by_score(text: str, scores: dict[str, int]) -> list[str]:
    """SentencePiece's BPE, plainly: always merge the neighbours with the best score, the leftmost first."""
    symbols = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(symbols)]
        candidates = [(-scores[piece], i) for i, piece in enumerate(pairs) if piece in scores]
        if not candidates:
            return symbols
        _, i = min(candidates)
        symbols[i : i + 2] = [pairs[i]]


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", None])
def test_other_kinds_are_refused_by_name(kind: str | None) -> None:
    with pytest.raises(UnsupportedModelError, match=repr(kind)):
        read_gguf_vocabulary({"tokenizer.ggml.model": kind})


def test_an_unknown_cut_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'newest-thing'"):
        read_gguf_vocabulary(byte_level(pre="newest-thing"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level(tokens=None), "tokens is missing"),
        (byte_level(tokens=[], token_type=[]), "empty"),
        (byte_level(tokens=["a", 7], token_type=[1, 1]), "entry 1 of tokens"),
        (byte_level(tokens=["a", "a"], token_type=[1, 1]), "tokens 0 and 1"),
        (byte_level(token_type=[1]), "1 token types"),
        (byte_level(token_type=["1"] * 256), "entry 0 of token_type"),
        (byte_level() | {"tokenizer.ggml.merges": None}, "merges is missing"),
        (byte_level() | {"tokenizer.ggml.merges": ["ab"]}, "'ab' is not two tokens"),
        (byte_level() | {"tokenizer.ggml.merges": ["a bb"]}, "do not fit together"),
        (byte_level(bos_token_id=256), "bos_token_id is 256"),
        (byte_level(eos_token_id=-1), "eos_token_id is -1"),
        (byte_level(eos_token_id="x"), "eos_token_id is 'x'"),
        (sentencepiece(["a"], scores=[0.0]), "1 scores"),
        (sentencepiece(["a"], scores=None), "scores is missing"),
        (sentencepiece(["a"], scores=[float("nan")] * 260), "not a number"),
    ],
)
def test_lists_that_contradict_each_other_are_corrupt(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModelError, match=message) as caught:
        read_gguf_vocabulary(metadata)
    assert caught.value.hint
