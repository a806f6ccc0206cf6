"""Progress protocol: how long work on bytes tells whoever watches: start, advance, finish, one task at a time."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Shows how far a task is. Every `start` is followed by `finish`, also when the task fails."""

    def start(self, label: str, total_bytes: int | None) -> None:
        """A task begins; `total_bytes` is None when nobody knows."""
        ...

    def advance(self, count_bytes: int) -> None:
        """`count_bytes` more are done. A task that starts over gives a negative count."""
        ...

    def finish(self) -> None:
        """The task is over."""
        ...


class NullProgress:
    """Shows nothing."""

    def start(self, label: str, total_bytes: int | None) -> None:
        pass

    def advance(self, count_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass
