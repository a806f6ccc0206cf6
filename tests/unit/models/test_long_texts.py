"""A long text must not hold up the rest of the process: heartbeats and other people's tokens."""

from __future__ import annotations

import threading
import time

import pytest
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, pre_tokenizers

from shardcompute.core.errors import PromptTooLongError
from shardcompute.models.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pipeline = Pipeline(models.BPE(vocabulary, []))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return Tokenizer.from_hf(pipeline.to_str())


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer, text = byte_tokenizer(), "all work and no play " * 50_000
    began, ended = threading.Event(), threading.Event()
    ids: list[int] = []

    def encode() -> None:
        began.set()
        ids.extend(tokenizer.encode(text))
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    began.wait()
    turns = 0
    while not ended.is_set():
        turns += 1
        time.sleep(0)
    thread.join()
    # Held up, this thread would get a few turns before and after.
    assert turns > 50
    assert tokenizer.decode(ids) == text


def test_text_far_beyond_the_context_is_refused_without_all_of_it_being_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    plain = Tokenizer._encode_plain

    def note(tokenizer: Tokenizer, text: str) -> list[int]:
        seen.append(len(text))
        return plain(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "_encode_plain", note)
    with pytest.raises(PromptTooLongError, match="maximum context length is 64 tokens"):
        byte_tokenizer().encode("x " * 500_000, context_length=64)
    assert sum(seen) < 100_000
    assert len(byte_tokenizer().encode("x " * 200, context_length=64)) > 64
