"""The coordinator, as its parts see it: the state, one clock, one thread that decides, and others for what waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from shardcompute.control.events import Event
from shardcompute.control.state import ClusterState

Task = Callable[[], None]
Background = Callable[[Task], None]
"""Runs a task that waits for others, somewhere else than in the coordinator's thread."""


class CoordinatorPort(Protocol):
    """`apply` belongs to the coordinator's thread; the others may be called from any."""

    @property
    def state(self) -> ClusterState: ...

    @property
    def has_stood_down(self) -> bool:
        """Nothing is decided any more."""
        ...

    @property
    def may_act(self) -> bool:
        """Whether no other coordinator can be acting, and all that was decided is on record."""
        ...

    def now_s(self) -> float:
        """Every time in the state is of this clock."""
        ...

    def apply(self, event: Event) -> None: ...

    def post(self, event: Event) -> None:
        """Apply this when its turn comes."""
        ...

    def later(self, task: Task) -> None:
        """Run this in the coordinator's thread."""
        ...

    def after(self, delay_s: float, task: Task) -> None:
        """Run this there, when so much time has passed."""
        ...

    def background(self, task: Task) -> None:
        """Run what waits for others elsewhere."""
        ...


def start_thread(task: Task) -> None:
    threading.Thread(target=task, name="coordinator task", daemon=True).start()
