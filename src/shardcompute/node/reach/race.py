"""A race of attempts to make one link: the first that succeeds wins, and whoever comes later is closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.wire import Link

Attempt = Callable[[], Link | None]
"""Makes a link, or None where it only started others. Raises LinkError."""


class Race:
    """Attempts run in threads of their own and may start others. `on_late` gets each link that comes after the
    winner."""

    def __init__(self, node: str, timeout_s: float, on_late: Callable[[Link], None]) -> None:
        self._node = node
        self._deadline = time.monotonic() + timeout_s
        self._on_late = on_late
        self._changed = threading.Condition()
        self._running = 0
        self._winner: Link | None = None
        self._is_over = False
        self._failures: dict[str, LinkError] = {}

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def failures(self) -> dict[str, LinkError]:
        """Why attempts failed, by their rungs; the last of each."""
        with self._changed:
            return dict(self._failures)

    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def start(
        self,
        rung: str,
        attempt: Attempt,
        *,
        after_s: float = 0.0,
        otherwise: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin an attempt, `after_s` from now unless the race is over by then: then `otherwise` frees what the attempt
        would have used."""
        with self._changed:
            self._running += 1
        threading.Thread(
            target=self._run,
            args=(rung, attempt, after_s, otherwise),
            name=f"{rung} to {self._node}",
            daemon=True,
        ).start()

    def wait(self, patience_s: float) -> Link | None:
        """The winner, or None after so much time, or once nobody runs any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._winner is not None or not self._running, patience_s)
            return self._winner

    def finish(self) -> Link:
        """The winner; `LinkError` says of each rung why it was none."""
        self.wait(self.left_s())
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            if self._winner is not None:
                return self._winner
            failures = dict(self._failures)
        if len(failures) == 1:
            [only] = failures.values()
            raise only
        why = (
            "; ".join(f"{rung}: {error.message}" for rung, error in failures.items())
            or "no way ended in time"
        )
        first = next(iter(failures.values()), None)
        raise LinkError(
            f"{self._node} cannot be reached ({why})", hint="" if first is None else first.hint
        ) from (None if first is None else first.__cause__)

    def _run(self, rung: str, attempt: Attempt, after_s: float, otherwise: Callable[[], None]) -> None:
        link: Link | None = None
        failure: LinkError | None = None
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._winner is not None, after_s)
            is_wanted = not self._is_over and self._winner is None
        try:
            if is_wanted:
                link = attempt()
            else:
                otherwise()
        except LinkError as error:
            failure = error
        except (ShardComputeError, OSError, ValueError) as error:
            failure = LinkError(str(error))
        with self._changed:
            self._running -= 1
            is_winner = link is not None and self._winner is None and not self._is_over
            if is_winner:
                self._winner = link
            if failure is not None:
                self._failures[rung] = failure
            self._changed.notify_all()
        if link is not None and not is_winner:
            self._on_late(link)
