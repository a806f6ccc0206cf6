"""Sizes as people write and read them."""

from __future__ import annotations

import re

from shardcompute.core.errors import UsageError

_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,15})?)\s*(?P<unit>[KMGT]?)(?:I?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Bytes of a size such as 512M or 2G; units are powers of 1024, with or without B or iB behind them."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match["number"]) * 1024 ** _POWERS[match["unit"].upper()]) if match else 0
    if not 0 < size < 1 << 63:
        raise UsageError(f"{text!r} is not a size", hint="write it like 512M or 2G")
    return size


def format_age(seconds: float) -> str:
    """How long ago, in the largest whole unit."""
    for unit, length in (("year", 31_557_600), ("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "now"


def format_rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f} tokens/s"
