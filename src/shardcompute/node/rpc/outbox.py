"""A link on which nobody ever waits to send: what is put here goes out in order, as fast as the link takes it.

For messages that are made under a lock or in an event loop. What waits is bounded by whoever makes it: the tokens of
generations that were accepted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from shardcompute.core.errors import LinkError
from shardcompute.wire import Body, Link, LinkPump, Message


class Outbox:
    """Owns `link` from `start` on. `take` hears what comes, `on_ended`, once, that nothing more will; both in the
    link's receiving thread."""

    def __init__(
        self, link: Link, take: Callable[[Message, memoryview], None], on_ended: Callable[[LinkError], None]
    ) -> None:
        self._pump = LinkPump(link, take, on_ended, capacity_frames=sys.maxsize)

    def start(self) -> None:
        self._pump.start()

    def put(self, message: Message, body: Body = ()) -> None:
        """Dropped once the link has ended, of which `on_ended` hears."""
        with contextlib.suppress(LinkError):
            self._pump.offer(message, body)

    def close(self) -> None:
        """End the link; what was not sent by now is not sent."""
        self._pump.close()
