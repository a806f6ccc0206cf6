"""Counters, gauges and histograms, written in Prometheus' text form. Which ones we keep is in `table`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metric(Protocol):
    def lines(self) -> list[str]:
        """HELP, TYPE and one line per sample, for each name of the metric."""
        ...


class Counter:
    """A sum that only grows, one per combination of label values."""

    def __init__(self, names: Sequence[str], text: str, labels: Sequence[str] = ()) -> None:
        self._names, self._text, self._labels = names, text, labels
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *values: str) -> None:
        self._sums[values] = self._sums.get(values, 0.0) + amount

    def lines(self) -> list[str]:
        sums = self._sums or ({} if self._labels else {(): 0.0})
        samples = [(_labelled(self._labels, values), total) for values, total in sorted(sums.items())]
        lines: list[str] = []
        for name in self._names:
            lines += _header(name, self._text, "counter")
            lines += [f"{name}{labels} {_number(total)}" for labels, total in samples]
        return lines


class Gauge:
    """A value as it is now."""

    def __init__(self, names: Sequence[str], text: str, value: float) -> None:
        self._names, self._text, self._value = names, text, value

    def lines(self) -> list[str]:
        value = _number(self._value)
        return [
            line for name in self._names for line in (*_header(name, self._text, "gauge"), f"{name} {value}")
        ]


class Gauges:
    """Values as they are now, one per combination of label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, *values: str) -> None:
        self._values[values] = value

    def lines(self) -> list[str]:
        samples = [
            f"{self._name}{_labelled(self._labels, values)} {_number(value)}"
            for values, value in sorted(self._values.items())
        ]
        return [*_header(self._name, self._text, "gauge"), *samples]


class Histogram:
    """How often a duration fell under each bound, one per combination of label values."""

    def __init__(
        self,
        names: Sequence[str],
        text: str,
        labels: Sequence[str] = (),
        bounds: Sequence[float] = _SECONDS,
    ) -> None:
        self._names, self._text, self._labels, self._bounds = names, text, labels, bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *values: str) -> None:
        counts = self._counts.setdefault(values, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[values] = self._sums.get(values, 0.0) + value

    def lines(self) -> list[str]:
        lines: list[str] = []
        for name in self._names:
            lines += _header(name, self._text, "histogram")
            for values, counts in sorted(self._counts.items()):
                below = 0
                for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
                    below += count
                    labels = _labelled((*self._labels, "le"), (*values, _number(bound)))
                    lines.append(f"{name}_bucket{labels} {below}")
                labels = _labelled(self._labels, values)
                lines.append(f"{name}_sum{labels} {_number(self._sums[values])}")
                lines.append(f"{name}_count{labels} {below}")
        return lines


def _header(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _labelled(labels: Sequence[str], values: Sequence[str]) -> str:
    if not labels:
        return ""
    pairs = zip(labels, values, strict=True)
    return "{" + ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(int(value) if value == int(value) else value)
