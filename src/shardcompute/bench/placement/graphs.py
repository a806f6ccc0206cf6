"""Graphs that are no chain, sliced: over all orders of their parts, in one order, and with towers where they are today.

Today a tower lies with the embedding on the first stage, and everything else is a chain.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardcompute.bench.report import Result
from shardcompute.control.solver.slicing import GraphPart, SlicedGraph, SlicingMachine, slice_graph

_MANY = 4096
_MIB = float(1 << 20)
_LAYER = 30 * _MIB
_ROWS = 64
"""Of a prompt with a picture: what is handed on from layer to layer is as long as it."""
_ROW_BYTES = 8192.0


def _layers(count: int, first_needs: Sequence[int], at: int, *, also: Sequence[int] = ()) -> list[GraphPart]:
    """A run of layers from index `at` on, each behind the one before, and all behind `also`."""
    return [
        GraphPart(_LAYER, _LAYER, _ROWS * _ROW_BYTES, (*(first_needs if n == 0 else (at + n - 1,)), *also))
        for n in range(count)
    ]


def encoder_decoder(layers: int = 12) -> list[GraphPart]:
    """Every layer of the decoder reads what the encoder says, which so crosses every cut behind it."""
    table = GraphPart(0.0, 8 * _LAYER, _ROWS * _ROW_BYTES)
    encoder = _layers(layers, (0,), 1)
    start = GraphPart(0.0, _MIB, _ROW_BYTES)
    decoder = _layers(layers, (layers + 1,), layers + 2, also=(layers,))
    return [table, *encoder, start, *decoder]


def towers_and_decoder(towers: int, layers: int = 16) -> list[GraphPart]:
    """Towers, such as for pictures and sounds, and a table of words; a decoder behind all of them."""
    parts = [GraphPart(0.0, 8 * _LAYER, _ROWS * _ROW_BYTES)]
    ends = [0]
    for _ in range(towers):
        at = len(parts)
        parts += _layers(8, (), at)
        ends.append(len(parts) - 1)
    return [*parts, *_layers(layers, ends, len(parts))]


GRAPHS: Mapping[str, list[GraphPart]] = {
    "encoder and decoder": encoder_decoder(),
    "vision tower and decoder": towers_and_decoder(1),
    "two towers and decoder": towers_and_decoder(2),
}


def gathered(parts: Sequence[GraphPart]) -> list[GraphPart]:
    """As it is placed today: all that lies before the decoder's first layer is one part, on the first machine."""
    first = min(index for index, part in enumerate(parts) if len(part.needs) > 1)
    kept = [index for index in range(first) if any(index in part.needs for part in parts[first:])]
    one = GraphPart(
        sum(part.work_bytes for part in parts[:first]),
        sum(part.memory_bytes for part in parts[:first]),
        sum(parts[index].output_bytes for index in kept),
    )
    rest = [
        replace(part, needs=tuple(sorted({max(0, need - first + 1) for need in part.needs})))
        for part in parts[first:]
    ]
    return [one, *rest]


def _machines(seed: int, count: int, parts: Sequence[GraphPart]) -> list[SlicingMachine]:
    chance = random.Random(seed)
    whole = sum(part.memory_bytes for part in parts)
    return [
        SlicingMachine(
            1 / chance.choice([10e9, 20e9, 40e9]),
            whole * chance.uniform(0.4, 0.8),
            chance.choice([0.001, 0.01, 0.04]),
            chance.choice([1.25e6, 12.5e6, 125e6]),
        )
        for _ in range(count)
    ]


def measure_graphs(seeds: int, machines: int = 3) -> Iterator[Result]:
    """How much longer one pass takes than with the best slices, in the median over clusters, and what finding takes."""
    for name, parts in GRAPHS.items():
        ways = {
            "all orders": (parts, None),
            "one order": (parts, 0),
            "as placed today": (gathered(parts), None),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        more: dict[str, list[float]] = {way: [] for way in ways}
        for seed in range(seeds):
            over = _machines(seed, machines, parts)
            found: dict[str, SlicedGraph | None] = {}
            for way, (graph, most) in ways.items():
                started_s = time.process_time()
                found[way] = slice_graph(graph, over, most_down_sets=_MANY if most is None else most)
                times[way].append(time.process_time() - started_s)
            best = found["all orders"]
            for way, each in found.items():
                if best is not None and each is not None:
                    more[way].append(each.latency_s / best.latency_s - 1)
        for way in ways:
            labels = {"method": way, "graph": name}
            yield Result("found", len(more[way]), f"of {seeds} clusters", labels)
            yield Result("CPU time", 1000 * statistics.median(times[way]), "ms", labels)
            if more[way]:
                yield Result("longer than the best slices", 100 * statistics.median(more[way]), "%", labels)
