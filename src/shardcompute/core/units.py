"""Numbers as people say them."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(size_bytes: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


def format_rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f} tok/s" if tokens_per_s >= 100 else f"{tokens_per_s:.1f} tok/s"


def format_seconds(seconds: float) -> str:
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    if 0 < seconds < 1e-4:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def count_of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def name_layers(start: int, stop: int) -> str:
    """Layers `[start, stop)` as people count them, both ends included."""
    return f"layers {start} to {stop - 1}" if stop - start > 1 else f"layer {start}"
