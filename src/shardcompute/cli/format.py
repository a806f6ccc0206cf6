"""Parsing and formatting of sizes, times and rates, as people write and read them."""

from __future__ import annotations

import re

from shardcompute.core.errors import UsageError

_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,15})?)\s*(?P<unit>[KMGT]?)(?:I?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_DURATION = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[smhdw]?)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_size(text: str) -> int:
    """Bytes of a size such as 512M or 2G; units are powers of 1024, with or without B or iB behind them."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match["number"]) * 1024 ** _POWERS[match["unit"].upper()]) if match else 0
    if not 0 < size < 1 << 63:
        raise UsageError(f"{text!r} is not a size", hint="write it like 512M or 2G")
    return size


def parse_duration(text: str) -> float:
    """Seconds of a time such as 90s, 30m, 1h, 7d or 2w; without a unit it means seconds."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match["number"]) * _SECONDS[match["unit"].lower()] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"{text!r} is not a length of time", hint="write it like 30m, 1h or 7d")
    return seconds


def format_duration(seconds: float) -> str:
    """With one digit behind the point below a minute, above that in whole units, small enough to be exact enough."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, length in (("d", 86_400), ("h", 3_600)):
        if seconds >= 2 * length or seconds == length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds // 60)} min"


def format_age(seconds: float) -> str:
    """How long ago, in the largest whole unit."""
    for unit, length in (("year", 31_557_600), ("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "now"


def format_rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f} tokens/s"


def format_count(count: int) -> str:
    """Parameters as people say them: 135 M, 8.2 B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
