"""How a cluster sends activations: `exact`, the name of a codec, or `auto`, chosen frame by frame."""

from __future__ import annotations

from shardcompute.core.errors import UsageError
from shardcompute.wire.codecs import CODECS

EXACT, AUTO = "exact", "auto"


def check_wire(name: str) -> str:
    """UsageError unless this names a way to send activations."""
    if name != AUTO and name not in CODECS:
        raise UsageError(
            f"activations cannot be sent as {name!r}", hint=f"use one of {', '.join([AUTO, *CODECS])}"
        )
    return name
