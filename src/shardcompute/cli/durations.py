"""Times as people write and read them."""

from __future__ import annotations

import re

from shardcompute.core.errors import UsageError

_DURATION = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[smhdw]?)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


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
