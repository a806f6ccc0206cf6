"""Loops in answers: what a small model says again and again, which any drafter can copy."""

from __future__ import annotations

_LEAST_TIMES = 3
_LEAST_CHARS = 24
"""A loop is at least so long in all; three dots are none."""
_LONGEST_PERIOD = 400
LOOPING_SHARE = 0.2
"""From this share of an answer on it counts as a looping one."""


def loop_share(text: str) -> float:
    """How much of a text is inside passages that repeat one piece at least three times in a row."""
    if not text:
        return 0.0
    inside = bytearray(len(text))
    for period in range(1, min(_LONGEST_PERIOD, len(text) // _LEAST_TIMES) + 1):
        least = max(_LEAST_TIMES * period, _LEAST_CHARS)
        for start, stop in _runs(text, period):
            if stop - start >= least:
                inside[start:stop] = b"\1" * (stop - start)
    return inside.count(1) / len(text)


def is_looping(text: str) -> bool:
    return loop_share(text) >= LOOPING_SHARE


def _runs(text: str, period: int) -> list[tuple[int, int]]:
    """The longest passages in which every character is the one `period` before it, that first one included."""
    runs, since = [], None
    for index in range(period, len(text) + 1):
        is_same = index < len(text) and text[index] == text[index - period]
        if is_same and since is None:
            since = index - period
        elif not is_same and since is not None:
            runs.append((since, index))
            since = None
    return runs
