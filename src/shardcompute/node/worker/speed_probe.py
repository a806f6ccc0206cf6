"""Speed probe: how fast this machine is, measured before anybody has to rely on it.

The fastest of several tries counts: what else the machine does meanwhile only ever makes one slower.
"""

from __future__ import annotations

import time

import numpy as np

from shardcompute.backends.matrix import BlockMatrix
from shardcompute.backends.ort.graph import GraphWriter, use_threads
from shardcompute.backends.ort.linear import Linear, write_linear
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.models.spec import Stage
from shardcompute.runtime.stage import StageRuntime

# Larger than a core's own cache, like a model's weights.
_WIDTH = 4096
_MULTIPLICATIONS = 40
_ROUNDS = 9
_PROBE_SESSION = 0


def measure_seconds_per_byte(threads: int) -> float:
    """Seconds to multiply one row with one byte of 8-bit weights: what decoding is made of."""
    use_threads(threads)
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (_WIDTH, _WIDTH // 32, 32), dtype=np.uint8)
    scales = np.full((_WIDTH, _WIDTH // 32), 0.01, dtype=np.float32)
    graph = GraphWriter()
    x = graph.input("x", [1, "rows", _WIDTH])
    graph.rename(write_linear(graph, x, Linear((BlockMatrix(8, 32, codes, scales),), None)), "y")
    graph.output("y", [1, "rows", _WIDTH])
    session = graph.open()
    row = random.standard_normal((1, 1, _WIDTH), dtype=np.float32)
    times = []
    for _ in range(_MULTIPLICATIONS):
        started = time.perf_counter()
        session.run(["y"], {"x": row})
        times.append(time.perf_counter() - started)
    return min(times) / (_WIDTH * _WIDTH)


def measure_layer(runtime: StageRuntime, stage: Stage, hidden: int) -> float:
    """Seconds for one layer and one row of a loaded stage, as decoding will need."""
    activations = None if stage.is_first else np.full((1, hidden), 0.1, dtype=np.float32)
    opening = Opening(_PROBE_SESSION, Sampling(), 1)
    times = []
    for position in range(_ROUNDS):
        work = [SessionRows(_PROBE_SESSION, position, (1,))]
        started = time.perf_counter()
        runtime.step(work, [opening] if position == 0 else [], activations)
        times.append(time.perf_counter() - started)
    runtime.close_sessions([_PROBE_SESSION])
    return min(times) / stage.count
