"""Slicing of graphs that are no chain: an encoder beside a decoder, a vision tower before one, over machines in order.

Parts may be computed in any order that their inputs allow. What is computed before a cut is a *down-set* of the graph:
with each part all that it needs. Dynamic programming over down-sets, machine by machine, finds the best slices of *all*
topological orders at once; an encoder and a decoder of n and m layers have about n·m down-sets. Where a graph has more
than can be looked at, the prefixes of one topological order do, and the result says so.

A value that is needed behind a cut travels over it once, whoever needs it, and is passed on until its last use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from shardcompute.core.errors import UsageError

_MOST_DOWN_SETS = 2048


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A piece of a model that is computed whole: what it reads, holds and hands on, and whose results it needs."""

    work_bytes: float
    memory_bytes: float
    output_bytes: float
    needs: tuple[int, ...] = ()
    """Indices of parts, all smaller than its own."""


@dataclass(frozen=True, slots=True)
class SlicingMachine:
    """A machine, and its line to the next one."""

    seconds_per_byte: float
    memory_bytes: float
    hop_s: float = 0.0
    bytes_per_s: float = inf


@dataclass(frozen=True, slots=True)
class SlicedGraph:
    """Which parts each machine computes, the first machine first; one may have none."""

    slices: tuple[tuple[int, ...], ...]
    latency_s: float
    """Once through all parts, with what travels in between."""
    bottleneck_s: float
    """Of the slowest slice or line."""
    is_exact: bool
    """No other slices are better; else none that keep to one topological order are."""


def slice_graph(
    parts: Sequence[GraphPart],
    machines: Sequence[SlicingMachine],
    *,
    most_s: float = inf,
    most_down_sets: int = _MOST_DOWN_SETS,
) -> SlicedGraph | None:
    """The slices of least latency in which no machine or line takes longer than `most_s`; None where memory does not
    suffice. UsageError for a graph that cannot be."""
    _check(parts)
    sets = list(_down_sets(parts, most_down_sets + 1))
    is_exact = len(sets) <= most_down_sets
    if not is_exact:
        sets = [0, *accumulate((1 << part for part in range(len(parts))), lambda done, part: done | part)]
    sets.sort(key=lambda done: (done.bit_count(), done))
    graph = _Measured(parts, sets)
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for number, machine in enumerate(machines):
        is_last = number == len(machines) - 1
        best.append(graph.extend(best[-1], machine, most_s, is_last=is_last))
    whole = (1 << len(parts)) - 1
    if whole not in best[-1]:
        return None
    cuts = [whole]
    for table in reversed(best[1:]):
        cuts.append(table[cuts[-1]][1])
    cuts.reverse()
    return graph.told(cuts, machines, is_exact=is_exact)


def fastest_slices(
    parts: Sequence[GraphPart], machines: Sequence[SlicingMachine], *, rounds: int = 24
) -> SlicedGraph | None:
    """The slices whose slowest machine or line is quickest, by bisection; of these the ones of least latency."""
    best = slice_graph(parts, machines)
    if best is None:
        return None
    low, high = 0.0, best.bottleneck_s
    for _ in range(rounds):
        middle = (low + high) / 2
        found = slice_graph(parts, machines, most_s=middle)
        if found is None:
            low = middle
        else:
            best, high = found, found.bottleneck_s
    return best


def _check(parts: Sequence[GraphPart]) -> None:
    if not parts or any(not 0 <= need < index for index, part in enumerate(parts) for need in part.needs):
        raise UsageError(
            "a graph needs parts, each behind all that it needs", hint="list parts in a topological order"
        )


def _down_sets(parts: Sequence[GraphPart], most: int) -> Iterator[int]:
    """Sets of parts, as bits, that contain with each part all that it needs; `most` of them."""
    needs = [sum(1 << need for need in set(part.needs)) for part in parts]
    seen, waiting = {0}, [0]
    while waiting and len(seen) <= most:
        done = waiting.pop()
        for part, need in enumerate(needs):
            more = done | 1 << part
            if more != done and need & ~done == 0 and more not in seen:
                seen.add(more)
                waiting.append(more)
    yield from list(seen)[:most]


class _Measured:
    """Sums over down-sets, of which a slice is the difference of two."""

    def __init__(self, parts: Sequence[GraphPart], sets: Sequence[int]) -> None:
        self._parts = parts
        self._sets = sets
        self._work = {done: sum(part.work_bytes for part in self._in(done)) for done in sets}
        self._memory = {done: sum(part.memory_bytes for part in self._in(done)) for done in sets}
        self._users = [
            sum(1 << user for user, other in enumerate(parts) if part in other.needs)
            for part in range(len(parts))
        ]
        self._crossing = {done: self._bytes_over(done) for done in sets}

    def _in(self, done: int) -> Iterator[GraphPart]:
        return (part for index, part in enumerate(self._parts) if done >> index & 1)

    def _bytes_over(self, done: int) -> float:
        """What is known before a cut and needed behind it, each value once."""
        return sum(
            part.output_bytes
            for index, part in enumerate(self._parts)
            if done >> index & 1 and self._users[index] & ~done
        )

    def line_s(self, done: int, machine: SlicingMachine) -> float:
        """For how long a cut keeps a line busy."""
        return self._crossing[done] / machine.bytes_per_s

    def extend(
        self,
        before: dict[int, tuple[float, int]],
        machine: SlicingMachine,
        most_s: float,
        *,
        is_last: bool,
    ) -> dict[int, tuple[float, int]]:
        """The least latency up to every down-set with one machine more, and the down-set before it."""
        whole = self._sets[-1]
        after: dict[int, tuple[float, int]] = {}
        for done in [whole] if is_last else self._sets:
            sent_s = 0.0 if is_last else self.line_s(done, machine)
            hop_s = 0.0 if is_last else machine.hop_s + sent_s
            if sent_s > most_s:
                continue
            best = (inf, 0)
            for start, (latency_s, _) in before.items():
                if start & ~done or self._memory[done] - self._memory[start] > machine.memory_bytes:
                    continue
                stage_s = (self._work[done] - self._work[start]) * machine.seconds_per_byte
                if stage_s <= most_s:
                    best = min(best, (latency_s + stage_s + hop_s, start))
            if best[0] < inf:
                after[done] = best
        return after

    def told(self, cuts: Sequence[int], machines: Sequence[SlicingMachine], *, is_exact: bool) -> SlicedGraph:
        latency_s = slowest_s = 0.0
        slices = []
        for number, machine in enumerate(machines):
            start, done = cuts[number], cuts[number + 1]
            stage_s = (self._work[done] - self._work[start]) * machine.seconds_per_byte
            sent_s = 0.0 if number == len(machines) - 1 else self.line_s(done, machine)
            latency_s += stage_s + (0.0 if number == len(machines) - 1 else machine.hop_s + sent_s)
            slowest_s = max(slowest_s, stage_s, sent_s)
            slices.append(tuple(part for part in range(len(self._parts)) if (done & ~start) >> part & 1))
        return SlicedGraph(tuple(slices), latency_s, slowest_s, is_exact)
