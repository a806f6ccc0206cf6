"""`bench codecs`: what each form of activations costs and saves, on real text.

The model is cut into stages in this process. Every text runs through the exact chain, then through the same stages
with each codec at every cut. Loss is what that does to the next-token distributions: mean KL divergence from the
exact chain, change of perplexity, and how often the greedy token stays the same (which is how often a draft that was
right stays right). Times are of encoding and decoding one text's frame, the best of a few; bytes are those of the
frame's body, for one token and all cuts together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array
from shardcompute.bench.quality import Text, read_texts
from shardcompute.bench.report import Result, Say
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.resolve import ModelFiles
from shardcompute.wire import CODECS, Codec, find_codec

_CONTEXT = 512
_REPEATS = 3
Value = TypeVar("Value")
LogProbabilities = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CodecBench:
    files: Callable[[], ModelFiles]
    data: Path
    forms: Sequence[str] = ("native",)
    cuts: Sequence[int] = (2, 5)
    codecs: Sequence[str] = tuple(CODECS)
    texts: int = 30
    threads: int = 2


@dataclass(slots=True)
class _Sums:
    """Of one codec over all texts so far."""

    tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0
    agreeing: int = 0
    body_bytes: int = 0
    rows: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Hop:
    """Carries activations over every cut, and notes what that takes."""

    codec: Codec
    sums: _Sums = field(default_factory=_Sums)

    def carry(self, activations: Array) -> Array:
        encode_s, parts = _best(lambda: self.codec.encode(activations))
        body = memoryview(b"".join(parts))
        decode_s, decoded = _best(lambda: self.codec.decode(body, *activations.shape))
        self.sums.encode_s += encode_s
        self.sums.decode_s += decode_s
        self.sums.body_bytes += body.nbytes
        self.sums.rows += len(activations)
        return decoded


def run_codec_bench(bench: CodecBench, say: Say) -> list[Result]:
    for name in bench.codecs:
        if name not in CODECS:
            raise UsageError(f"there is no codec {name!r}", hint=f"use some of {', '.join(CODECS)}")
    return [
        result for form in bench.forms for cuts in bench.cuts for result in _measure(bench, form, cuts, say)
    ]


def _measure(bench: CodecBench, form: str, cuts: int, say: Say) -> list[Result]:
    """All codecs at so many cuts."""
    what = f"{form} weights, {cuts} cuts"
    with ExitStack() as stack:
        say(f"{what}: loading")
        with open_checkpoint(bench.files()) as checkpoint:
            layers = checkpoint.spec.layer_count
            if not 1 <= cuts < layers:
                raise UsageError(f"{layers} layers cannot be cut {cuts} times", hint="choose fewer --cuts")
            options = ExecutorOptions(
                kv_bytes=256 << 20, context_length=_CONTEXT, max_logit_rows=_CONTEXT, threads=bench.threads
            )
            chain = [
                open_shard(checkpoint, stage=stage, form=form, options=options)
                for stage in cut_evenly(layers, cuts)
            ]
            for executor in chain:
                stack.callback(executor.close)
            texts = read_texts(bench.data, checkpoint.tokenizer(), bench.texts)
        exact = _Hop(find_codec("exact"))
        hops = [_Hop(find_codec(name)) for name in bench.codecs if name != "exact"]
        for number, text in enumerate(texts, start=1):
            _score(chain, text, exact, hops)
            say(f"{what}: {number} of {len(texts)} texts")
    return [
        result
        for hop in [exact, *hops]
        for result in _results(hop, exact, {"weights": form, "cuts": cuts, "texts": len(texts)})
    ]


def cut_evenly(layers: int, cuts: int) -> list[Stage]:
    bounds = [round(index * layers / (cuts + 1)) for index in range(cuts + 2)]
    return [Stage(bounds[i], bounds[i + 1], layers) for i in range(cuts + 1)]


def _score(chain: Sequence[Executor], text: Text, exact: _Hop, hops: Sequence[_Hop]) -> None:
    targets = text.ids[1:]
    truth = _run(chain, text, exact)
    probabilities = np.exp(truth)
    for hop in [exact, *hops]:
        found = truth if hop is exact else _run(chain, text, hop)
        sums = hop.sums
        sums.tokens += len(targets)
        sums.loss -= float(found[np.arange(len(targets)), targets].sum())
        sums.kl += float((probabilities * (truth - found)).sum())
        sums.agreeing += int((found.argmax(axis=-1) == truth.argmax(axis=-1)).sum())


def _run(chain: Sequence[Executor], text: Text, hop: _Hop) -> LogProbabilities:
    """Log-probabilities of all next tokens."""
    count = len(text.ids) - 1
    flowing: Array = text.ids[:-1]
    for index, executor in enumerate(chain):
        is_last = index == len(chain) - 1
        out = executor.step([Segment(0, 0, count, count if is_last else 0)], flowing)
        # The executor reuses its output.
        flowing = np.array(out, dtype=np.float32)
        executor.close_session(0)
        if not is_last:
            flowing = hop.carry(flowing)
    logits = flowing.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def _results(hop: _Hop, exact: _Hop, labels: dict[str, Any]) -> list[Result]:
    sums, truth = hop.sums, exact.sums
    labels = {"codec": hop.codec.name, **labels, "tokens": sums.tokens}
    perplexity, exact_perplexity = math.exp(sums.loss / sums.tokens), math.exp(truth.loss / truth.tokens)
    return [
        Result("bytes_per_token", sums.body_bytes * labels["cuts"] / sums.rows, "bytes", labels),
        Result("encode", 1e6 * sums.encode_s / sums.rows, "µs/row", labels),
        Result("decode", 1e6 * sums.decode_s / sums.rows, "µs/row", labels),
        Result("perplexity_change", perplexity / exact_perplexity - 1, "fraction", labels),
        # Rounding can leave a sum of differences just under zero.
        Result("mean_kl", max(sums.kl / sums.tokens, 0.0), "nats", labels),
        Result("greedy_agreement", sums.agreeing / sums.tokens, "fraction", labels),
    ]


def _best(work: Callable[[], Value]) -> tuple[float, Value]:
    """The quickest of a few runs: whatever else goes on only ever makes one slower."""
    times_s = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        value = work()
        times_s.append(time.perf_counter() - started)
    return min(times_s), value
