"""Links as if their machines were far apart: delay, rate, jitter and blackouts applied to what each side sends.

`ShapedTransport` stands in for the transport that it wraps, on both sides of every link. A dialler tells its machine
behind the role (`stage@m1`), and finds the other machine by the address it dials. All links of a process share its
machine's uplink. `send` takes what a socket's buffer would take and blocks beyond that; a thread of each link hands
frames on when they would have arrived. Nothing is lost, as over TCP: a lost packet costs a round trip more, a cut
path holds everything back until it is mended.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.sim.conditions import Path
from shardcompute.sim.lines import Line
from shardcompute.sim.shape_file import NetworkShape
from shardcompute.sim.wrapped_link import WrappedLink
from shardcompute.wire import Admit, Hello, Link, LinkOptions, Listener, Message, Transport, WireLimits
from shardcompute.wire.framing import Body, pack_frame
from shardcompute.wire.links import DEFAULT_OPTIONS

# What Linux lets a connection's send buffer grow to by default.
_BUFFER_BYTES = 4 << 20
_SEGMENT_BYTES = 1448
_LOOK_S = 0.02
_LINGER_S = 2.0
_OPENING_ROUND_TRIPS = 3
_MARK = "@"
_NO_WAY = Path(0.0)


class Weather(Protocol):
    def shape(self) -> NetworkShape:
        """The conditions now."""


class Uplink:
    """A machine's uplink, shared by all links of its process."""

    def __init__(self, machine: str, weather: Weather, clock: Callable[[], float] = time.monotonic) -> None:
        self.machine = machine
        self.clock = clock
        self._weather = weather
        self._lock = threading.Lock()
        self._line = Line(1.0, 0.0)
        self._chance = random.Random()

    def path_to(self, peer: str) -> Path:
        # What a machine sends to itself never leaves it.
        return _NO_WAY if peer == self.machine else self._weather.shape().conditions.path(self.machine, peer)

    def arrival_s(self, peer: str, size_bytes: int) -> float:
        """When a frame that is sent now is there, were the path never cut."""
        if peer == self.machine:
            return self.clock()
        conditions = self._weather.shape().conditions
        path, port = conditions.path(self.machine, peer), conditions.port(self.machine)
        now_s = self.clock()
        with self._lock:
            if self._line.bytes_per_s != port.uplink_bytes_per_s:
                self._line.retune(port.uplink_bytes_per_s, port.queue_s, now_s)
            through_s = self._line.append(now_s, size_bytes)
            extra_s = self._chance.random() * path.jitter_s
            segments = 1 + size_bytes // _SEGMENT_BYTES
            if path.loss and self._chance.random() > (1 - path.loss) ** segments:
                extra_s += 2 * path.delay_s
        return through_s + path.delay_s + extra_s


class ShapedLink(WrappedLink):
    """One end of a link to a machine that is far away."""

    def __init__(self, link: Link, role: str, far: str, uplink: Uplink, options: LinkOptions) -> None:
        super().__init__(link)
        self.role = role
        self._far = far
        self._uplink = uplink
        self._limits: WireLimits = options.limits
        self._timeout_s = options.frame_timeout_s
        self._changed = threading.Condition()
        self._queue: deque[tuple[float, Message, Body, int]] = deque()
        self._queued_bytes = 0
        self._last_s = 0.0
        self._is_closing = False
        self._end: LinkError | None = None
        self._thread = threading.Thread(target=self._deliver, name=f"wan to {far}", daemon=True)
        self._thread.start()

    def send(self, message: Message, body: Body = ()) -> None:
        size_bytes = sum(map(len, pack_frame(message, body, self._limits)))
        # The caller may use its buffers again once a socket has them.
        kept = tuple(bytes(part) for part in body)
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: (
                    self._is_closing or not self._queue or self._queued_bytes + size_bytes <= _BUFFER_BYTES
                ),
                self._timeout_s + size_bytes / DEFAULT_OPTIONS.slowest_bytes_per_s,
            )
            if self._is_closing:
                raise self._end or LinkClosedError(f"the link to {self.peer!r} was closed here")
            if not has_room:
                raise LinkError(f"{self.peer!r} reads too slowly", hint="the emulated network is very slow")
            self._last_s = max(self._last_s, self._uplink.arrival_s(self._far, size_bytes))
            self._queue.append((self._last_s, message, kept, size_bytes))
            self._queued_bytes += size_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """What is on its way has a moment to arrive, as it has in a socket that is closed."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LINGER_S)
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()
        self._link.close()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._queue)
                if not self._queue:
                    return
                due_s, message, body, size_bytes = self._queue[0]
            if not self._wait_until(due_s):
                return
            try:
                self._link.send(message, body)
            except LinkError as error:
                with self._changed:
                    self._end, self._is_closing = error, True
                    self._queue.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                if self._queue:
                    self._queue.popleft()
                    self._queued_bytes -= size_bytes
                self._changed.notify_all()

    def _wait_until(self, due_s: float) -> bool:
        """True when the frame has arrived; False if the link was given up first."""
        while (left_s := due_s - self._uplink.clock()) > 0:
            with self._changed:
                if not self._queue:
                    return False
                self._changed.wait(left_s)
        was_cut = False
        while (path := self._uplink.path_to(self._far)).is_cut:
            was_cut = True
            with self._changed:
                if not self._queue:
                    return False
                self._changed.wait(_LOOK_S)
        if was_cut:
            time.sleep(path.delay_s)
        return True


class ShapedListener(Closing):
    def __init__(self, listener: Listener, uplink: Uplink, options: LinkOptions) -> None:
        self._listener = listener
        self._uplink = uplink
        self._options = options

    @property
    def address(self) -> str:
        return self._listener.address

    def accept(self, timeout_s: float | None = None) -> ShapedLink:
        link = self._listener.accept(timeout_s)
        role, _, far = link.role.rpartition(_MARK)
        return ShapedLink(link, role, far, self._uplink, self._options)

    def close(self) -> None:
        self._listener.close()


class ShapedTransport:
    """The links of a process on `machine`."""

    def __init__(
        self, inner: Transport, machine: str, weather: Weather, clock: Callable[[], float] = time.monotonic
    ) -> None:
        weather.shape().conditions.index(machine)
        self._inner = inner
        self._weather = weather
        self._uplink = Uplink(machine, weather, clock)

    def dial(self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS) -> ShapedLink:
        far = self._machine_at(url)
        self._travel(url, far, options)
        told = msgspec.structs.replace(ours, role=f"{ours.role}{_MARK}{self._uplink.machine}")
        return ShapedLink(self._inner.dial(url, told, options), "", far, self._uplink, options)

    def listen(
        self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS, admit: Admit | None = None
    ) -> ShapedListener:
        def judge(hello: Hello, certificate: bytes | None) -> str | None:
            role, mark, far = hello.role.rpartition(_MARK)
            if not mark or far not in self._weather.shape().conditions.machines:
                return "this node is on an emulated network, and the one that dials is not"
            return admit(msgspec.structs.replace(hello, role=role), certificate) if admit else None

        return ShapedListener(self._inner.listen(url, ours, options, judge), self._uplink, options)

    def _machine_at(self, url: str) -> str:
        machine = self._weather.shape().addresses.get(urlsplit(url).netloc)
        if machine is None:
            raise LinkError(
                f"no machine of the emulated network listens at {url}",
                hint="start every node with --shape and a port of its own",
            )
        return machine

    def _travel(self, url: str, far: str, options: LinkOptions) -> None:
        """The time that connecting, TLS and introductions take; LinkError if the path is cut for too long."""
        deadline = time.monotonic() + options.handshake_timeout_s
        while (path := self._uplink.path_to(far)).is_cut:
            if time.monotonic() > deadline:
                raise LinkError(f"{url} cannot be reached: timed out", hint="the path to it is cut")
            time.sleep(_LOOK_S)
        time.sleep(_OPENING_ROUND_TRIPS * 2 * path.delay_s)
