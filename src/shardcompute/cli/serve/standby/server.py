"""HTTP server of a coordinator that waits: in a thread of its own, from when it is known that another leads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardcompute.core.closing import Closing
from shardcompute.core.errors import ShardComputeError

if TYPE_CHECKING:
    from shardcompute.api.access.hosts import AllowedHosts
    from shardcompute.node.coordinator.shared import Standing
    from shardcompute.security.https.server import ServerTls
    from shardcompute.security.https.sources import KeyedCertificate

_GRACE_S = 1


@dataclass(frozen=True, slots=True)
class StandbyAddress:
    """Where the API of a coordinator is, whether it leads or waits."""

    host: str
    port: int
    hosts: AllowedHosts
    tls: ServerTls | None
    on_listening: Callable[[str, int], None]
    on_certificate: Callable[[KeyedCertificate], None]


class StandbyServer(Closing):
    """Answers from the first `hear` until it is closed; then the port is free for the leader's API. Not being able to
    is said, and is no reason not to wait."""

    def __init__(self, address: StandbyAddress, say: Callable[[str], None]) -> None:
        self._address = address
        self._say = say
        self._standing: Standing | None = None
        self._thread: threading.Thread | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._has_begun = threading.Event()

    def hear(self, standing: Standing) -> None:
        """How things are now."""
        self._standing = standing
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="standby API", daemon=True)
            self._thread.start()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._has_begun.wait()
        if self._running is not None:
            loop, stop = self._running
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(stop.set)
        thread.join()
        self._running = None
        self._has_begun.clear()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except ShardComputeError as error:
            self._say(f"nobody is told over HTTP that another coordinator leads: {error.message}")
        finally:
            self._has_begun.set()

    async def _serve(self) -> None:
        from shardcompute.api.server import serve
        from shardcompute.api.standby import create_standby_app

        stop = asyncio.Event()
        self._running = (asyncio.get_running_loop(), stop)
        self._has_begun.set()
        address = self._address
        await serve(
            create_standby_app(self._look, hosts=address.hosts),
            address.host,
            address.port,
            on_listening=address.on_listening,
            stop=stop,
            grace_s=_GRACE_S,
            tls=address.tls,
            on_certificate=address.on_certificate,
        )

    def _look(self) -> Standing:
        assert self._standing is not None
        return self._standing
