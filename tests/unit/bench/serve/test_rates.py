"""What `bench serve` makes of what its clients saw."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardcompute.bench.serve.client import _read
from shardcompute.bench.serve.run import ServeBench, prompt_ids, rates_of, ready_parts
from shardcompute.bench.serve.shapes import make_checkpoint
from shardcompute.core.errors import UsageError
from shardcompute.core.phases import Phase
from shardcompute.core.settings import Settings
from shardcompute.models.spec import whole
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve


def reply(began: float, first: float, tokens: int, per_chunk: int = 1) -> dict[str, object]:
    chunks = tokens // per_chunk
    return {
        "began": began,
        "arrivals": [first + 0.1 * per_chunk * i for i in range(chunks)],
        "tokens": tokens,
    }


def test_the_rate_is_that_of_the_time_in_which_all_were_answering() -> None:
    # The second begins a second later: until then one stream has the machine to itself.
    rate, total = rates_of([reply(100.0, 0.1, 50), reply(101.0, 0.1, 50)])
    assert rate == pytest.approx(20.0, rel=0.06)
    assert total == pytest.approx(100 / 6.0, rel=0.02)


def test_chunks_of_several_tokens_count_as_several() -> None:
    one, _ = rates_of([reply(0.0, 0.1, 60)])
    several, _ = rates_of([reply(0.0, 0.1, 60, per_chunk=3)])
    assert several == pytest.approx(one, rel=0.06)


def test_streams_that_never_overlap_have_no_rate_but_the_whole() -> None:
    rate, total = rates_of([reply(0.0, 0.1, 10), reply(50.0, 0.1, 10)])
    assert rate == total


def test_a_response_is_read_whatever_pieces_it_came_in() -> None:
    chunks = [{"choices": [{"text": text}]} for text in ("a", "b", "c")]
    told = {"choices": [], "usage": {"completion_tokens": 3}, "timings": {"compute_s": 0.5}}
    body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in (*chunks, told))
    whole = b"HTTP/1.1 200 OK\r\n\r\n5f\r\n" + body
    pieces = [(0.01 * i, whole[i : i + 7]) for i in range(0, len(whole), 7)]
    read = _read(pieces)
    assert (read["text"], read["tokens"], len(read["arrivals"])) == ("abc", 3, 3)
    assert read["timings"] == {"compute_s": 0.5}
    assert _read([(0.0, b"HTTP/1.1 429 Too Many Requests\r\n\r\nslow down")])["error"].endswith("slow down")


def test_memory_is_asked_for_that_holds_all_streams() -> None:
    bench = ServeBench("model", streams=(1, 64), prompts=(64, 2000), tokens=128)
    assert bench.kv_tokens >= 64 * (2000 + 128)
    assert bench.context > bench.long_prompt
    few = ServeBench("model", streams=(1, 64), prompts=(64, 2000), most_streams={2000: 8})
    assert few.loads == [(64, 1), (64, 64), (2000, 1)]
    assert few.kv_tokens < bench.kv_tokens
    assert prompt_ids(5, 1) == prompt_ids(5, 1) != prompt_ids(5, 2)


def test_a_random_checkpoint_opens_and_every_token_has_a_text(tmp_path: Path) -> None:
    folder = make_checkpoint("tiny", tmp_path)
    assert make_checkpoint("tiny", tmp_path) == folder
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(data_dir=tmp_path))) as checkpoint:
        assert checkpoint.spec.vocab_size == 512
        tokenizer = checkpoint.tokenizer()
        assert all(tokenizer.token_bytes(token) for token in range(258, 512))
        matrix = checkpoint.source(whole(checkpoint.spec)).matrix("head").to_dense()
        assert matrix.shape == (512, 64)
        assert 0.1 < float(np.std(matrix)) < 0.3
    with pytest.raises(UsageError, match="shape"):
        make_checkpoint("900b", tmp_path)


def test_phases_of_several_processes_are_told_in_the_order_of_their_ends() -> None:
    parts = ready_parts(
        {
            "coordinator": [Phase("devices", 5.0, 106.0), Phase("waiting for workers", 6.0, 112.5)],
            "worker-1": [Phase("imports", 1.0, 108.0)],
        },
        began_at_s=100.0,
    )
    told = [
        (each.labels["process"], each.labels["phase"], each.value, each.labels["until_s"]) for each in parts
    ]
    assert told == [
        ("coordinator", "devices", 5.0, 6.0),
        ("worker-1", "imports", 1.0, 8.0),
        ("coordinator", "waiting for workers", 6.0, 12.5),
    ]
