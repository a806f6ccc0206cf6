"""Relay server: lets members in by their tickets, brings two that name each other together, and splices their bytes.

It checks tickets against one public key and knows nothing else of the cluster. Everything is bounded: connections that
have not said what they want, links in all and of one member, bytes a second of one member, and what is kept of a
direction whose receiver is slow. Every wait at the door has a deadline; a link that is spliced lasts until an end hangs
up or the system finds it gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from shardcompute.core.closing import Closing
from shardcompute.core.errors import AuthError, CapacityError, LinkError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.core.rate_limited_log import RateLimitedLog
from shardcompute.core.sockets.accepting import accept_one, wait_after
from shardcompute.core.sockets.hosts import plain_address
from shardcompute.core.sockets.keepalive import keep_alive
from shardcompute.core.sockets.listening import listen
from shardcompute.relay.channels import BUFFER_BYTES, Channel, SocketChannel, open_door
from shardcompute.relay.messages import (
    CHALLENGE_BYTES,
    LENGTH,
    AwaitVisitor,
    Challenge,
    Declined,
    DoorMessage,
    Enter,
    Meet,
    Spliced,
    attendance_of,
    check_length,
    pack,
    unpack,
    unpack_meeting,
)
from shardcompute.relay.tickets import check_proof, read_ticket

log = logging.getLogger(__name__)
_BACKLOG = 128
_ENTRIES = ("links", "join")


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay gives. `bytes_per_s` is of one member, in and out together; `waiting` counts connections that have
    not shown a ticket, of which the oldest makes room for the next."""

    links: int = 256
    links_per_member: int = 64
    bytes_per_s: float = 64.0 * (1 << 20)
    waiting: int = 128
    door_s: float = 10.0
    meet_s: float = 15.0
    attending: int = 8
    """Connections on which coordinators wait for whoever enters, by entry; the oldest makes room."""


@dataclass(frozen=True, slots=True)
class RelayView:
    """A relay at one moment: members with how many connections, spliced or waiting for a peer, and bytes passed on."""

    connections: int
    members: int
    spliced_bytes: int


@dataclass(slots=True)
class _Waiting:
    """The first of two, until the second comes."""

    channel: Channel
    member: str
    met: asyncio.Future[None]
    is_free: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody reads from its channel any more to see whether it hangs up."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class _Allowance:
    """Bytes that a member may pass on, which come back with time: at most one second's worth."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._left = bytes_per_s
        self._then_s = time.monotonic()

    async def spend(self, size_bytes: int) -> None:
        """Returns once so many may pass. While somebody waits here, nothing more of theirs is read."""
        now_s = time.monotonic()
        gained = (now_s - self._then_s) * self._bytes_per_s
        self._left = min(self._bytes_per_s, self._left + gained) - size_bytes
        self._then_s = now_s
        if self._left < 0:
            await asyncio.sleep(-self._left / self._bytes_per_s)


class RelayServer(Closing):
    """Serves in a thread of its own until it is closed. Port 0: any free one. `entries` are servers of this machine, by
    name, that anybody may be passed on to, because they look at whoever comes themselves."""

    def __init__(
        self,
        host: str,
        port: int,
        cluster_key: bytes,
        *,
        entries: Mapping[str, tuple[str, int]] | None = None,
        limits: RelayLimits | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster_key = cluster_key
        self._entries = dict(entries or {})
        self._limits = limits or RelayLimits()
        self._tls = tls
        self._clock = clock
        self._limited_log = RateLimitedLog(log)
        self._visits: set[asyncio.Task[None]] = set()
        self._untaken: set[socket.socket] = set()
        """Connections that no transport has yet."""
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._transports: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()
        """Of all connections: one that is closed lives on until what it has to say is said."""
        self._meetings: dict[tuple[bytes, str, str], _Waiting] = {}
        self._attending: dict[str, list[_Waiting]] = {}
        self._held: Counter[str] = Counter()
        self._allowances: dict[str, _Allowance] = {}
        self._spliced_bytes = 0
        try:
            self._socket = listen(host, port, _BACKLOG)
        except OSError as error:
            raise LinkError(
                f"port {port} on {host} cannot be used for a relay: {error.strerror or error}",
                hint="choose another port",
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def view(self) -> RelayView:
        held = dict(self._held)
        return RelayView(sum(held.values()), len(held), self._spliced_bytes)

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        with self._socket:
            self._socket.setblocking(False)
            accepting = asyncio.create_task(self._accept())
            await self._ending.wait()
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        visits = list(self._visits)
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)
        for transport in list(self._transports):
            transport.abort()

    async def _accept(self) -> None:
        while True:
            try:
                sock = await accept_one(self._socket)
            except BlockingIOError:
                continue
            except OSError as error:
                self._limited_log.warning("accept", "the relay cannot accept a connection: %s", error)
                await wait_after(error)
            else:
                self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        visit = asyncio.get_running_loop().create_task(self._greet(sock))
        self._visits.add(visit)
        self._untaken.add(sock)

        def end(done: asyncio.Task[None]) -> None:
            # Also of one that is cancelled before it begins.
            self._visits.discard(done)
            if sock in self._untaken:
                self._untaken.discard(sock)
                sock.close()

        visit.add_done_callback(end)

    def _channel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
        self._transports.add(writer.transport)
        return SocketChannel(reader, writer)

    async def _greet(self, sock: socket.socket) -> None:
        """One connection, from its first byte to its end. Never raises."""
        keep_alive(sock)
        self._untaken.discard(sock)  # from here on its transport closes it
        with contextlib.suppress(asyncio.CancelledError):
            # Cancelled: whoever made room for others, or was here when the relay closed. The task is nobody's.
            reader, writer = await asyncio.open_connection(sock=sock, limit=BUFFER_BYTES)
            channel = self._channel(reader, writer)
            address, port = (writer.get_extra_info("peername") or ("?", 0))[:2]
            host = plain_address(str(address))
            try:
                await self._serve(channel, host, int(port))
            except (ShardComputeError, OSError, TimeoutError, EOFError, ValueError) as error:
                what = str(error) or type(error).__name__
                self._limited_log.info(host, "the relay ends a connection of %s: %s", host, what)
            finally:
                channel.close()

    async def _serve(self, channel: Channel, host: str, port: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._strangers) >= self._limits.waiting:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[task] = None
        try:
            async with asyncio.timeout(self._limits.door_s):
                channel = await open_door(channel, self._tls)
                nonce = secrets.token_bytes(CHALLENGE_BYTES)
                await channel.write(pack(Challenge(nonce, host, port)))
                request = await _take_message(channel)
        finally:
            self._strangers.pop(task, None)
        try:
            if isinstance(request, Meet):
                await self._meet(channel, request, nonce)
            elif isinstance(request, Enter):
                await self._enter(channel, request, host)
            elif isinstance(request, AwaitVisitor):
                await self._attend(channel, request, nonce)
            else:
                raise LinkError(f"{type(request).__name__} came at the relay's door")
        except (AuthError, CapacityError) as error:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._limits.door_s):
                    await channel.write(pack(Declined(shorten(error.message), shorten(error.hint))))
            raise

    async def _meet(self, channel: Channel, request: Meet, nonce: bytes) -> None:
        ticket = read_ticket(request.ticket, self._cluster_key, now_s=self._clock())
        check_proof(ticket, request.proof, nonce, request.request)
        wanted, member = unpack_meeting(request.request), ticket.node_id
        with self._counted(member):
            first = self._meetings.pop((wanted.meeting, wanted.peer, member), None)
            if first is None or first.met.done():
                await self._wait_for(wanted.meeting, _Waiting(channel, member, _new_future()), wanted.peer)
                return
            first.met.set_result(None)
            try:
                await first.is_free.wait()
                await channel.write(pack(Spliced()))
                await first.channel.write(pack(Spliced()))
                await self._splice(channel, first.channel, {member, first.member})
            finally:
                first.done.set()

    async def _wait_for(self, meeting: bytes, waiting: _Waiting, peer: str) -> None:
        """Until the peer has come, and then until the link that it splices has ended."""
        key = (meeting, waiting.member, peer)
        self._meetings[key] = waiting
        hang_up = asyncio.ensure_future(_until_gone(waiting.channel))
        try:
            async with asyncio.timeout(self._limits.meet_s):
                await asyncio.wait({waiting.met, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise CapacityError(
                f"{peer} did not come to the relay within {self._limits.meet_s:g} s",
                hint="it may be gone, or not reach this relay",
            ) from None
        finally:
            hang_up.cancel()
            await asyncio.gather(hang_up, return_exceptions=True)
            if self._meetings.get(key) is waiting:
                del self._meetings[key]
            waiting.is_free.set()
        if waiting.met.done():
            await waiting.done.wait()

    async def _attend(self, channel: Channel, request: AwaitVisitor, nonce: bytes) -> None:
        """Until somebody has entered, and then until the link with that one has ended."""
        ticket = read_ticket(request.ticket, self._cluster_key, now_s=self._clock())
        check_proof(ticket, request.proof, nonce, attendance_of(request.entry))
        if not ticket.attends:
            raise AuthError(
                f"{ticket.node_id} is no coordinator, and nobody is led to it",
                hint="members are met by name; coordinators alone wait for whoever enters",
            )
        if request.entry not in _ENTRIES:
            raise AuthError(
                f"nobody enters {request.entry[:20]!r}", hint="run the same release on every node"
            )
        with self._counted(ticket.node_id):
            waiting = _Waiting(channel, ticket.node_id, _new_future())
            others = self._attending.setdefault(request.entry, [])
            others.append(waiting)
            if len(others) > self._limits.attending:
                oldest = others.pop(0)
                oldest.channel.close()
            hang_up = asyncio.ensure_future(_until_gone(channel))
            try:
                async with asyncio.timeout(max(ticket.expires_at_s - self._clock(), 0.0)):
                    await asyncio.wait({waiting.met, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                hang_up.cancel()
                await asyncio.gather(hang_up, return_exceptions=True)
                if waiting in others:
                    others.remove(waiting)
                waiting.is_free.set()
            if waiting.met.done():
                await waiting.done.wait()

    def _next_attending(self, entry: str) -> _Waiting:
        """The one that came last: it is the least likely to be gone. `AuthError` where nobody waits."""
        waiting = self._attending.get(entry)
        if not waiting:
            raise AuthError(
                f"this relay leads to no server called {entry[:20]!r}",
                hint="name the coordinator's own relay, or one that the cluster is told of with --relay",
            )
        return waiting.pop()

    async def _lead_to(self, channel: Channel, first: _Waiting, host: str) -> None:
        """To a coordinator that waits here."""
        first.met.set_result(None)
        try:
            await first.is_free.wait()
            await first.channel.write(pack(Spliced()))
            await channel.write(pack(Spliced()))
            await self._splice(channel, first.channel, {f"at {host}", first.member})
        finally:
            first.done.set()

    async def _enter(self, channel: Channel, request: Enter, host: str) -> None:
        with self._counted(f"at {host}"):
            target = self._entries.get(request.entry)
            if target is None:
                await self._lead_to(channel, self._next_attending(request.entry), host)
                return
            reader, writer = await asyncio.open_connection(*target, limit=BUFFER_BYTES)
            inside = self._channel(reader, writer)
            try:
                await channel.write(pack(Spliced()))
                await self._splice(channel, inside, {f"at {host}"})
            finally:
                inside.close()

    @contextlib.contextmanager
    def _counted(self, member: str) -> Iterator[None]:
        """One more link of a member; `CapacityError` where that is too many."""
        limits = self._limits
        if self._held[member] >= limits.links_per_member:
            raise CapacityError(
                f"{member} has {self._held[member]} links through this relay, and may have no more",
                hint="raise --links-per-member at the relay",
            )
        if self._held.total() >= 2 * limits.links:
            raise CapacityError(
                f"this relay carries {limits.links} links, and takes no more",
                hint="raise --links at the relay, or start another relay",
            )
        self._held[member] += 1
        self._allowances.setdefault(member, _Allowance(limits.bytes_per_s))
        try:
            yield
        finally:
            self._held[member] -= 1
            if not self._held[member]:
                del self._held[member], self._allowances[member]

    async def _splice(self, a: Channel, b: Channel, members: set[str]) -> None:
        """Pass on what either end says until one hangs up."""
        allowances = [self._allowances[member] for member in members]
        ways = {asyncio.ensure_future(self._copy(*way, allowances)) for way in ((a, b), (b, a))}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            a.close()
            b.close()

    async def _copy(self, source: Channel, target: Channel, allowances: list[_Allowance]) -> None:
        while data := await source.read():
            for allowance in allowances:
                await allowance.spend(len(data))
            await target.write(data)
            self._spliced_bytes += len(data)


async def _take_message(channel: Channel) -> DoorMessage:
    return unpack(await channel.take(check_length(await channel.take(LENGTH.size))))


async def _until_gone(channel: Channel) -> None:
    """Who waits has nothing to say: until it hangs up."""
    data = await channel.read()
    if data:
        channel.put_back(data)


def _new_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()
