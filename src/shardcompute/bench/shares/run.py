"""Runs `bench shares`: a cluster of two workers, and a client that computes the same text plainly and on shares.

Arms take turns, row by row, over the same tokens. Two tell what shares cost: the whole model by ONNX Runtime, in the
form that its files have, and the same with the chosen layers on shares. Two tell how far shares are off: all in
float32, the chosen layers by numpy in this process or on shares, which is all that these differ in. In the model's own
form later layers round activations to few bits, and make more of any difference.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array
from shardcompute.bench.questions import QUESTIONS
from shardcompute.bench.report import Result, Say
from shardcompute.bench.serve.shapes import make_checkpoint
from shardcompute.bench.servers import Server, cluster_arguments, serving
from shardcompute.cluster_client import ClusterClient
from shardcompute.core.batch import Segment
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import Stage
from shardcompute.node.enrolment.visiting import VisitedCluster, visit_cluster
from shardcompute.node.local.shared_stage import SharedStage
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.shares.pair import SharedLayers, SharePair
from shardcompute.runtime.shard import open_shard
from shardcompute.security.local_secret import read_local_secret
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

_SESSION = 1
_TOKEN_LIFE_S = 300.0


@dataclass(frozen=True, slots=True)
class ShareBench:
    model: str
    """A file or a folder."""
    layers: tuple[int, ...] = (1, 2)
    """So many first layers of it are shared."""
    prompt: int = 64
    steps: int = 32
    shape: str = "tiny"
    """A random model that is shared wholly."""


@dataclass(slots=True)
class _Arm:
    """Stages one after the other, and what they gave."""

    name: str
    stages: list[Executor]
    pair: SharePair | None = None
    prompt_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)
    first: list[Array] = field(default_factory=list)
    """What came out of the first stage."""

    def step(self, start: int, ids: Sequence[int]) -> float:
        segment = Segment(_SESSION, start, len(ids), 1)
        flowing: Array = np.asarray(ids, dtype=np.int64)
        began = time.perf_counter()
        for number, stage in enumerate(self.stages):
            flowing = np.array(stage.step([segment], flowing))
            if number == 0:
                self.first.append(flowing)
        took = time.perf_counter() - began
        self.logits.append(flowing)
        return took


def run_share_bench(bench: ShareBench, say: Say) -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory(prefix="shardcompute-shares-", ignore_cleanup_errors=True) as folder:
        results += _measure(bench, bench.model, bench.layers, Path(folder) / "given", say)
        shape = make_checkpoint(bench.shape, Path(folder))
        results += _measure(bench, str(shape), None, Path(folder) / "shape", say)
    return results


def _measure(
    bench: ShareBench, model: str, counts: Sequence[int] | None, folder: Path, say: Say
) -> list[Result]:
    """Of a model whose first so many layers are shared; None: all of it, and the head."""
    say(f"starting two workers for {model}")
    with ExitStack() as stack:
        server = stack.enter_context(serving("shares", model, cluster_arguments(2, "native")))
        visited = stack.enter_context(closing(_visit(server, folder)))
        files = resolve(parse_reference(model), load_settings())
        checkpoint = stack.enter_context(open_checkpoint(files))
        found = []
        layers = checkpoint.spec.layer_count
        for count in counts or (layers,):
            say(f"{checkpoint.name}: {count} of {layers} layers on shares")
            arms = _open_arms(bench, checkpoint, server, visited, count, has_head=counts is None)
            try:
                _run_arms(bench, checkpoint, arms, say)
                found += _results(bench, checkpoint, arms, count, has_head=counts is None)
            finally:
                for arm in arms:
                    _close(arm)
        return found


def _visit(server: Server, folder: Path) -> VisitedCluster:
    with ClusterClient(server.url, api_key=read_local_secret(server.folder)) as client:
        token = client.create_token(expires_s=_TOKEN_LIFE_S, max_uses=1, role="driver").token
    return visit_cluster(token, folder)


def _open_arms(
    bench: ShareBench,
    checkpoint: Checkpoint,
    server: Server,
    visited: VisitedCluster,
    count: int,
    *,
    has_head: bool,
) -> list[_Arm]:
    options = ExecutorOptions(kv_bytes=256 << 20, context_length=bench.prompt + bench.steps + 1, threads=1)
    state = server.state()
    machines = [Peer(each["id"], each["address"]) for each in state["nodes"] if each["role"] == "worker"]
    order = SharedLayers(state["models"][0]["name"], visited.coordinator(), 0, count, has_head)
    ends = sorted({0, count, checkpoint.spec.layer_count})
    cuts = [Stage(a, b, checkpoint.spec.layer_count) for a, b in pairwise(ends)]

    def plain(cut: Stage, backend: str, form: str) -> Executor:
        return open_shard(checkpoint, stage=cut, backend=backend, form=form, options=options)

    shared_arms = []
    for name, form in (("shares", "native"), ("shares in float32", "float32")):
        pair = SharePair(visited.endpoint.dialler("shares"), machines[:2], order)
        first = SharedStage(0, count, pair).open(checkpoint, cuts[0], "native", options)
        assert first is not None
        shared_arms.append(_Arm(name, [first, *(plain(each, "onnx", form) for each in cuts[1:])], pair))
    layers_here = [plain(cuts[0], "numpy", "float32"), *(plain(each, "onnx", "float32") for each in cuts[1:])]
    whole = Stage(0, checkpoint.spec.layer_count, checkpoint.spec.layer_count)
    return [_Arm("onnx", [plain(whole, "onnx", "native")]), *shared_arms, _Arm("float32", layers_here)]


def _run_arms(bench: ShareBench, checkpoint: Checkpoint, arms: Sequence[_Arm], say: Say) -> None:
    """The prompt at once, then a row at a time: the likeliest token by the first arm, for all of them."""
    tokenizer = checkpoint.tokenizer()
    words = tokenizer.encode(" ".join(QUESTIONS))
    ids = [words[at % len(words)] for at in range(bench.prompt)]
    for arm in arms:
        arm.prompt_s = arm.step(0, ids)
    for number in range(bench.steps):
        token = int(arms[0].logits[-1][-1].argmax())
        for arm in arms:
            arm.step_s.append(arm.step(bench.prompt + number, [token]))
        if number % 8 == 0:
            say(f"{number} of {bench.steps} rows")


def _close(arm: _Arm) -> None:
    for stage in arm.stages:
        stage.close()
    if arm.pair is not None:
        arm.pair.close()


def _results(
    bench: ShareBench, checkpoint: Checkpoint, arms: Sequence[_Arm], count: int, *, has_head: bool
) -> list[Result]:
    onnx, shares, exact_shares, exact = arms
    labels: dict[str, Any] = {
        "model": checkpoint.name,
        "shared": f"{count} of {checkpoint.spec.layer_count} layers" + (" and the head" if has_head else ""),
    }
    assert shares.pair is not None
    traffic, rows = shares.pair.traffic, bench.prompt + bench.steps
    differences = [np.abs(a - b).max() for a, b in zip(exact_shares.logits, exact.logits, strict=True)]
    inner = [np.abs(a - b).max() for a, b in zip(exact_shares.first, exact.first, strict=True)]
    largest = max(float(np.abs(each).max()) for each in exact.first)
    row_ratio = statistics.median(a / b for a, b in zip(shares.step_s, onnx.step_s, strict=True))
    return [
        Result("row by onnx", 1e3 * statistics.median(onnx.step_s), "ms", labels),
        Result("row with shares", 1e3 * statistics.median(shares.step_s), "ms", labels),
        Result("row, against onnx", row_ratio, "times", labels),
        Result("prompt, against onnx", shares.prompt_s / onnx.prompt_s, "times", labels),
        Result("sent per row", traffic.sent_bytes / rows, "bytes", labels),
        Result("received per row", traffic.received_bytes / rows, "bytes", labels),
        Result("round trips per step", traffic.products / (bench.steps + 1), "", labels),
        Result("largest error behind the shared part", float(max(inner)), "", labels),
        Result("largest value there", largest, "", labels),
        Result("largest error of a logit", float(max(differences)), "", labels),
        Result("same token in float32", _agreement(exact_shares, exact), "%", labels),
        Result("same token as onnx", _agreement(shares, onnx), "%", labels),
        Result("float32 and onnx agree", _agreement(exact, onnx), "%", labels),
    ]


def _agreement(one: _Arm, other: _Arm) -> float:
    pairs = zip(one.logits, other.logits, strict=True)
    return 100 * statistics.fmean(float(a[-1].argmax() == b[-1].argmax()) for a, b in pairs)
