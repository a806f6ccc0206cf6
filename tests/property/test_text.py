"""Tokens, bytes and text agree for any ids and any text."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from shardcompute.models.detokenizer import StreamingDetokenizer
from shardcompute.models.tokenizer import Tokenizer


@cache
def byte_level() -> Tokenizer:
    merges = [
        "\u0120 t",
        "h e",
        "\u0120t he",
        "\u00c3 \u00a9",
        "\u00f0 \u0141",
        "a a",
        "aa aa",
        "\u0120 \u0120",
    ]
    tokens = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(merge.replace(" ", "") for merge in merges),
        "<end>",
    ]
    return Tokenizer.from_gguf(
        keys(
            model="gpt2",
            pre="smollm",
            tokens=tokens,
            token_type=[1] * (len(tokens) - 1) + [3],
            merges=merges,
            eos_token_id=len(tokens) - 1,
        )
    )


@cache
def sentencepiece() -> Tokenizer:
    pieces = ["▁", "a", "b", "é", "漢", "ab", "▁a", "▁ab"]
    return Tokenizer.from_gguf(
        keys(
            model="llama",
            tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
            token_type=[2, 3, 3] + [6] * 256 + [1] * len(pieces),
            scores=[0.0] * 259 + [float(len(piece)) for piece in pieces],
        )
    )


def keys(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


tokenizers = st.sampled_from([byte_level, sentencepiece]).map(lambda build: build())
# Beyond both vocabularies, too: models pad theirs, and may emit such an id.
id_lists = st.lists(st.integers(0, 300), max_size=40)


@settings(max_examples=150, deadline=None)
@given(tokenizers, id_lists, st.booleans())
def test_a_stream_joined_is_the_text_in_one_go(
    tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    detokenizer = StreamingDetokenizer(tokenizer, skip_special=skip_special)
    pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]
    kept = [i for i in ids if not skip_special or i not in tokenizer.special_ids]
    assert "".join(pieces) == b"".join(map(tokenizer.token_bytes, kept)).decode(errors="replace")
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)
    for piece in pieces:
        piece.encode()  # no lone surrogates


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_how_bytes_fall_into_tokens_does_not_matter(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:stop] for start, stop in pairwise(bounds)]

    class Chunks:
        special_ids: frozenset[int] = frozenset()

        def token_bytes(self, token_id: int) -> bytes:
            return chunks[token_id]

    detokenizer = StreamingDetokenizer(Chunks())
    shown = ""
    for i in range(len(chunks)):
        shown += detokenizer.push(i)
        # Nothing shown is ever taken back, and only what is unfinished is held back: a character that lacks
        # bytes, or the first two bytes of a surrogate, which are two errors.
        read = b"".join(chunks[: i + 1]).decode(errors="replace")
        assert read.startswith(shown)
        assert read[len(shown) :] in ("", "\ufffd", "\ufffd\ufffd")
    assert shown + detokenizer.finish() == data.decode(errors="replace")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_byte_level_text_comes_back(text: str) -> None:
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab é漢😀▁\n"), max_size=40))
def test_sentencepiece_text_comes_back_after_its_leading_space(text: str) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id
    # SentencePiece writes a space as ▁, so a ▁ in the text comes back as a space.
    assert tokenizer.decode(ids) == (" " + text if text else "").replace("▁", " ")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_a_special_token_in_a_text_is_one_token(before: str, after: str) -> None:
    tokenizer = byte_level()
    (end,) = tokenizer.eos_ids
    ids = tokenizer.encode(before + "<end>" + after)
    assert ids == [*tokenizer.encode(before), end, *tokenizer.encode(after)]
