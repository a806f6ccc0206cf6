"""Links of a test's own network: real TCP and TLS, but a node can be frozen, killed or cut off from another.

`LabNetwork` is the transport of all its nodes. It knows every link by the node that holds that end of it:
a frozen node's ends neither send nor deliver, as if its process were stopped while the system keeps its sockets; a
dead node's ends are all closed at once; a cut closes what carries frames between two nodes. Nodes may be far from each
other: then every frame takes as long as `one_way_s` says, and a thread's `NetworkClock` tells how long its own took.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from shardcompute.core.errors import LinkClosedError, LinkError
from shardcompute.sim.conditions import Path
from shardcompute.sim.shaped_links import ShapedLink, Uplink
from shardcompute.sim.wrapped_link import WrappedLink
from shardcompute.wire import Hello, Link, LinkOptions, Message, TcpTransport, Transports
from shardcompute.wire.framing import Body
from shardcompute.wire.links import DEFAULT_OPTIONS, Admit
from shardcompute.wire.tcp import TcpListener

_DATA_ROLES = ("stage", "driver", "collective")
Watch = Callable[["LabLink", Message], None]
Tamper = Callable[["LabLink", Message], int]
"""How often what arrived on a link is delivered: 0 swallows it."""


class Gate:
    """Open, or shut for all who pass; `wait` also ends when the link does."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._open.wait(timeout_s)


class NetworkClock:
    """How long frames that a thread has sent and received were on their way: time that the network took, whatever else
    ran on the machine of the test. Stands in for `time` where links are measured."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def perf_counter(self) -> float:
        return getattr(self._threads, "now_s", 0.0)

    def spend(self, delay_s: float) -> None:
        self._threads.now_s = self.perf_counter() + delay_s


class Distance(Uplink):
    """The way from one node to another, which takes every frame so long."""

    def __init__(self, delay_s: float) -> None:
        self.clock = time.monotonic
        self.delay_s = delay_s

    def path_to(self, peer: str) -> Path:
        return Path(self.delay_s)

    def arrival_s(self, peer: str, size_bytes: int) -> float:
        return self.clock() + self.delay_s


class LabLink(WrappedLink):
    """One end of a real link, held by `owner`."""

    def __init__(self, link: Link, owner: str, role: str, network: LabNetwork) -> None:
        super().__init__(link)
        self._network = network
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._repeated: deque[tuple[Message, memoryview]] = deque()
        self.owner = owner
        self.kind = role
        self.is_data = role in _DATA_ROLES

    def send(self, message: Message, body: Body = ()) -> None:
        self._pass()
        with self._sending:
            super().send(message, body)
        self._network.clock.spend(self._network.one_way_s(self.owner, self.peer))

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]:
        while not self._repeated:
            message, body = super().receive(timeout_s)
            self._pass()
            self._network.clock.spend(self._network.one_way_s(self.peer, self.owner))
            self._network.arrived(self, message)
            times = self._network.times_delivered(self, message)
            self._repeated.extend([(message, body)] * times)
        return self._repeated.popleft()

    def close(self) -> None:
        self._closed.set()
        self._network.forget(self)
        super().close()

    def _pass(self) -> None:
        while not self._network.gate_of(self.owner).wait(0.05):
            if self._closed.is_set():
                raise LinkClosedError(f"the link to {self.peer!r} was closed here")


class LabListener:
    def __init__(self, listener: TcpListener, owner: str, network: LabNetwork) -> None:
        self._listener = listener
        self._owner = owner
        self._network = network
        self.address = listener.address

    def accept(self, timeout_s: float | None = None) -> LabLink:
        link = self._listener.accept(timeout_s)
        return self._network.hold(link, self._owner, link.role)

    def close(self) -> None:
        self._listener.close()


@dataclass
class LabNetwork:
    """All links of all nodes of a test. Methods may be called from any thread."""

    one_way_s: Callable[[str, str], float] = lambda source, target: 0.0
    """How long a frame takes from one node to another, besides what it takes anyway."""
    clock: NetworkClock = field(default_factory=NetworkClock)
    _gates: dict[str, Gate] = field(default_factory=dict)
    _links: set[LabLink] = field(default_factory=set)
    _listeners: dict[str, tuple[str, LabListener]] = field(default_factory=dict)
    _cuts: set[frozenset[str]] = field(default_factory=set)
    _dead: set[str] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _transport: TcpTransport = field(default_factory=TcpTransport)
    _watches: tuple[Watch, ...] = ()
    _tampers: tuple[Tamper, ...] = ()

    # What a node sees (a `wire.Transport`)

    def dial(self, url: str, ours: Hello, options: LinkOptions) -> LabLink:
        with self._lock:
            target = self._listeners.get(url, ("", None))[0]
            if ours.node in self._dead:
                raise LinkError("this node is dead")
            if ours.role in (*_DATA_ROLES, "probe") and frozenset((ours.node, target)) in self._cuts:
                raise LinkError(f"{url} cannot be reached: the way there is cut")
        self.gate_of(ours.node).wait()
        if not self.gate_of(target).wait(options.handshake_timeout_s):
            raise LinkError(f"{url} does not answer")
        return self.hold(self._transport.dial(url, ours, options), ours.node, ours.role)

    def listen(self, url: str, ours: Hello, options: LinkOptions, admit: Admit | None = None) -> LabListener:
        listener = LabListener(self._transport.listen(url, ours, options, admit), ours.node, self)
        with self._lock:
            self._dead.discard(ours.node)
            self._listeners[listener.address] = (ours.node, listener)
        return listener

    def hold(self, link: Link, owner: str, role: str) -> LabLink:
        delay_s = self.one_way_s(owner, link.peer)
        if delay_s:
            link = ShapedLink(link, role, link.peer, Distance(delay_s), DEFAULT_OPTIONS)
        held = LabLink(link, owner, role, self)
        with self._lock:
            is_dead = owner in self._dead
            self._links.add(held)
        if is_dead:
            held.close()
        return held

    def forget(self, link: LabLink) -> None:
        with self._lock:
            self._links.discard(link)

    def gate_of(self, node: str) -> Gate:
        with self._lock:
            return self._gates.setdefault(node, Gate())

    # What befalls it

    def freeze(self, node: str) -> None:
        self.gate_of(node).shut()

    def thaw(self, node: str) -> None:
        self.gate_of(node).open()

    def kill(self, node: str) -> None:
        """Every socket of the node is closed at once, and it opens no other."""
        with self._lock:
            self._dead.add(node)
            links = [link for link in self._links if link.owner == node]
            listeners = [listener for owner, listener in self._listeners.values() if owner == node]
        for listener in listeners:
            listener.close()
        for link in links:
            link.close()
        self.thaw(node)

    def cut(self, a: str, b: str, *, is_lasting: bool = False) -> int:
        """Break the links that carry frames between two nodes; a lasting cut lets no new ones through. Returns how
        many ends were closed."""
        pair = frozenset((a, b))
        with self._lock:
            if is_lasting:
                self._cuts.add(pair)
            links = [link for link in self._links if link.is_data and {link.owner, link.peer} == pair]
        for link in links:
            link.close()
        return len(links)

    def break_control(self, node: str) -> int:
        """The link of a node to its coordinator breaks. Returns how many there were."""
        return self.break_links(node, "control")

    def break_links(self, node: str, kind: str) -> int:
        """All links of a kind that this node holds an end of break. Returns how many there were."""
        with self._lock:
            links = [link for link in self._links if link.owner == node and link.kind == kind]
        for link in links:
            link.close()
        return len(links)

    def mend(self) -> None:
        with self._lock:
            self._cuts.clear()

    def open_links(self, owner: str | None = None) -> list[str]:
        """Of one node, or of all."""
        with self._lock:
            links = [link for link in self._links if owner in (None, link.owner)]
        return [f"{link.owner} has a {link.kind} link to {link.peer}" for link in links]

    # What can be seen of it

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Inside the block `watch` sees all that arrives anywhere, before whoever holds that end gets it; while it
        waits, so does what arrived."""
        with self._lock:
            self._watches = (*self._watches, watch)
        try:
            yield
        finally:
            with self._lock:
                self._watches = tuple(each for each in self._watches if each is not watch)

    @contextmanager
    def tampered(self, tamper: Tamper) -> Iterator[None]:
        """Inside the block `tamper` says how often what arrives anywhere is delivered."""
        with self._lock:
            self._tampers = (*self._tampers, tamper)
        try:
            yield
        finally:
            with self._lock:
                self._tampers = tuple(each for each in self._tampers if each is not tamper)

    def times_delivered(self, link: LabLink, message: Message) -> int:
        return min((tamper(link, message) for tamper in self._tampers), key=lambda n: (n == 1, n), default=1)

    def arrived(self, link: LabLink, message: Message) -> None:
        for watch in self._watches:
            watch(link, message)

    def send(self, owner: str, peer: str, kind: str, message: Message) -> None:
        """Say something over a link that is there already, in the name of the node that holds this end."""
        with self._lock:
            [link] = [
                each for each in self._links if (each.owner, each.peer, each.kind) == (owner, peer, kind)
            ]
        link.send(message)

    @property
    def transports(self) -> Transports:
        """For the options of a node that is to live on this network."""
        return Transports({"tcp": self})


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float) -> None:
    """Wait until `condition` holds; fails with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not in {timeout_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.005)
