"""Recovery of sessions across a change of shape: which stages must be told what they missed. Pure.

If the layers are cut as before and only machines changed, every stage that stayed goes on with its KV. Two new stages
side by side cannot be told: whoever could tell the second is new, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.control.state import Assignment


def new_stages(before: Sequence[Assignment], after: Sequence[Assignment]) -> frozenset[int] | None:
    """The places with new machines; None: everything must be computed again."""
    if [(s.start, s.stop) for s in before] != [(s.start, s.stop) for s in after] or not before:
        return None
    # Of ranks that are others, or have other shares, none can go on with what it holds.
    pairs = enumerate(zip(before, after, strict=True))
    new = frozenset(index for index, (old, now) in pairs if old != now)
    return None if any(index - 1 in new for index in new) else new
