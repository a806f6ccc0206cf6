"""Links within one process: `inproc://name`.

Frames are packed, checked and copied as on any other link, so that what works here works over a network and
no memory is shared by accident. Each direction holds a bounded number of frames; `send` blocks while it is
full. `InprocLink.sever` cuts a link as a crash would: frames on their way are lost. Names belong to an
`InprocTransport`, so that two of them never meet.
"""

from __future__ import annotations

import threading
from collections import deque
from urllib.parse import urlsplit

from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkClosedError, LinkError, UsageError
from shardcompute.wire.framing import PREFIX_BYTES, Body, pack_frame, unpack_header, unpack_prefix
from shardcompute.wire.handshake import Introduction, answer, read_answer
from shardcompute.wire.limits import HANDSHAKE_LIMITS
from shardcompute.wire.links import DEFAULT_OPTIONS, Admit, LinkOptions, LinkStats
from shardcompute.wire.messages import Hello, Message


class _Pipe:
    """One direction of a link: packed frames, as (prefix and header, body)."""

    def __init__(self, capacity_frames: int) -> None:
        self._capacity = capacity_frames
        self._frames: deque[tuple[bytes, bytearray]] = deque()
        self._is_finished = False
        self._changed = threading.Condition()

    def put(self, frame: tuple[bytes, bytearray], timeout_s: float) -> bool:
        """False if the pipe stayed full. `LinkClosedError` once it was finished."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._is_finished or len(self._frames) < self._capacity, timeout_s
            )
            if self._is_finished:
                raise LinkClosedError("the other end closed the link")
            if has_room:
                self._frames.append(frame)
                self._changed.notify_all()
            return has_room

    def get(self, timeout_s: float | None) -> tuple[bytes, bytearray]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_finished or self._frames, timeout_s):
                raise TimeoutError
            if not self._frames:
                raise LinkClosedError("the link was closed")
            self._changed.notify_all()
            return self._frames.popleft()

    def finish(self, *, is_lost: bool) -> None:
        """Take no more frames and, where `is_lost`, forget those on their way."""
        with self._changed:
            self._is_finished = True
            if is_lost:
                self._frames.clear()
            self._changed.notify_all()


class InprocLink(Closing):
    """One end of a pair."""

    certificate: bytes | None = None

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, address: str, options: LinkOptions) -> None:
        self.address = address
        self.peer = ""
        self.role = ""
        self.version = 0
        self._incoming = incoming
        self._outgoing = outgoing
        self._options = options
        self._limits = HANDSHAKE_LIMITS
        self._count = threading.Lock()
        self._sent = (0, 0)
        self._received = (0, 0)

    def introduced(self, introduction: Introduction) -> None:
        self.peer, self.role, self.version = introduction.peer, introduction.role, introduction.version
        self._limits = self._options.limits

    @property
    def stats(self) -> LinkStats:
        with self._count:
            return LinkStats(*self._sent, *self._received)

    def send(self, message: Message, body: Body = ()) -> None:
        head, *parts = pack_frame(message, body, self._limits)
        frame = (bytes(head), bytearray().join(parts))
        if not self._outgoing.put(frame, self._options.frame_timeout_s):
            self.close()
            raise LinkError(
                f"{self.peer or self.address} took no frame for {self._options.frame_timeout_s:g} s",
                hint="the node may be overloaded or stuck",
            )
        with self._count:
            self._sent = (self._sent[0] + 1, self._sent[1] + sum(map(len, frame)))

    def receive(self, timeout_s: float | None = None) -> tuple[Message, memoryview]:
        head, body = self._incoming.get(timeout_s)
        try:
            unpack_prefix(head[:PREFIX_BYTES], self._limits)
            message = unpack_header(head[PREFIX_BYTES:], len(body), self._limits)
        except LinkError:
            self.close()
            raise
        with self._count:
            self._received = (self._received[0] + 1, self._received[1] + len(head) + len(body))
        return message, memoryview(body)

    def close(self) -> None:
        self._outgoing.finish(is_lost=False)
        self._incoming.finish(is_lost=True)

    def sever(self) -> None:
        """Cut the link at once, in both directions, with whatever is on its way."""
        self._outgoing.finish(is_lost=True)
        self._incoming.finish(is_lost=True)


class InprocListener(Closing):
    def __init__(
        self, transport: InprocTransport, url: str, ours: Hello, options: LinkOptions, admit: Admit | None
    ) -> None:
        self.address = url
        self._transport = transport
        self._ours = ours
        self._options = options
        self._admit = admit
        self._ready: deque[InprocLink] = deque()
        self._is_closed = False
        self._changed = threading.Condition()

    def connect(self, ours: Hello, options: LinkOptions, capacity_frames: int) -> InprocLink:
        """The dialler's end of a new pair; both introductions happen in its thread."""
        there, back = _Pipe(capacity_frames), _Pipe(capacity_frames)
        near = InprocLink(back, there, self.address, options)
        far = InprocLink(there, back, f"{self.address}#{ours.node}", self._options)
        try:
            near.send(ours)
            theirs: LinkError | None = None
            try:
                far.introduced(answer(far, self._ours, self._admit, 0.0))
            except LinkError as error:
                theirs = error
            near.introduced(read_answer(near, ours, 0.0))
            if theirs is not None:
                raise theirs
            self._offer(far)
        except BaseException:
            near.sever()
            raise
        return near

    def accept(self, timeout_s: float | None = None) -> InprocLink:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closed or self._ready, timeout_s):
                raise TimeoutError(f"nobody dialled {self.address}")
            if self._is_closed:
                raise LinkClosedError(f"the listener at {self.address} is closed")
            return self._ready.popleft()

    def close(self) -> None:
        self._transport.forget(self)
        with self._changed:
            self._is_closed = True
            waiting = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        for link in waiting:
            link.close()

    def _offer(self, link: InprocLink) -> None:
        with self._changed:
            if self._is_closed or len(self._ready) >= self._options.max_pending:
                raise LinkError(
                    f"{self.address} accepts no links now", hint="the node may be overloaded or stopping"
                )
            self._ready.append(link)
            self._changed.notify_all()


class InprocTransport:
    """Listeners of one process by name. Of the options, those about sockets and TLS have no meaning here."""

    def __init__(self, capacity_frames: int = 64) -> None:
        self._capacity_frames = capacity_frames
        self._listeners: dict[str, InprocListener] = {}
        self._lock = threading.Lock()

    def dial(self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS) -> InprocLink:
        with self._lock:
            listener = self._listeners.get(_name_of(url))
        if listener is None:
            raise LinkError(f"nobody listens at {url}", hint="start the node that should listen there first")
        return listener.connect(ours, options, self._capacity_frames)

    def listen(
        self, url: str, ours: Hello, options: LinkOptions = DEFAULT_OPTIONS, admit: Admit | None = None
    ) -> InprocListener:
        name = _name_of(url)
        listener = InprocListener(self, url, ours, options, admit)
        with self._lock:
            if name in self._listeners:
                raise LinkError(f"{url} is already in use", hint="choose another name")
            self._listeners[name] = listener
        return listener

    def forget(self, listener: InprocListener) -> None:
        """The name of a closed listener is free again."""
        name = _name_of(listener.address)
        with self._lock:
            if self._listeners.get(name) is listener:
                del self._listeners[name]


def _name_of(url: str) -> str:
    name = urlsplit(url).netloc
    if not name:
        raise UsageError(f"{url!r} names no listener", hint="write inproc://name")
    return name
