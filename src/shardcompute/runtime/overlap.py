"""Overlap of steps: what a thread that computes does next, while a device may be computing the step before.

What is new is begun at once where it can be; a step is finished when the device is done with it.
"""

from __future__ import annotations

import queue
import time
from typing import TypeVar

from shardcompute.runtime.stage import PendingFrame

_LOOK_S = 1e-4
"""So often is looked whether a device has done its step while nothing new comes in."""
Item = TypeVar("Item")


def next_item(
    inbox: queue.SimpleQueue[Item], pending: PendingFrame | None, patience_s: float = 60.0
) -> tuple[Item] | None:
    """What came in next; None as soon as the pending step is done and nothing else is there, or `patience_s` are over:
    then it is to be finished. Waits for ever where nothing pends."""
    if pending is None:
        return (inbox.get(),)
    until_s = time.monotonic() + patience_s
    while not pending.is_ready() and time.monotonic() < until_s:
        try:
            return (inbox.get(timeout=_LOOK_S),)
        except queue.Empty:
            continue
    try:
        return (inbox.get_nowait(),)
    except queue.Empty:
        return None
