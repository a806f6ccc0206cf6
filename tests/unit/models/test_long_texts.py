"""A long text must not hold up the rest of the process: heartbeats and other people's tokens."""

from __future__ import annotations

import threading
import time

from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, pre_tokenizers

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
    assert turns > 1000
    assert tokenizer.decode(ids) == text
